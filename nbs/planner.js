// The planner of the home page: the arithmetic of `turboquant plan`, on numbers that a cell of index.ipynb took from the package.
// Without it the page shows the table of the first choice.
(() => {
  const MOST = 2 ** 30; // tokens: beyond it everything fits, as in `plan`
  const sum = (xs, f) => xs.reduce((total, x) => total + f(x), 0);
  // bytes of an uncompressed cache: layers are [values of a token, window or null]
  const plain = (model, tokens, batch) => sum(model.plain, ([values, window]) => values * (window === null ? tokens : Math.min(tokens, window - 1))) * 2 * batch;
  // bytes of a cache of codes: parts are [layers, bytes without a tile, of a tile, window or null]; tiles that no window sees are freed
  const coded = (cache, tokens, batch) => {
    const used = Math.ceil(tokens / cache.tile);
    const freed = window => (window === null ? 0 : Math.floor(Math.max(0, tokens - window + 1 - cache.margin) / cache.tile));
    return batch * sum(cache.parts, ([layers, fixed, size, window]) => layers * (fixed + size * (used - freed(window)))) + cache.tables + cache.rope * used * cache.tile;
  };
  const held = (model, name) => (name in model.caches ? (tokens, batch) => coded(model.caches[name], tokens, batch) : (tokens, batch) => plain(model, tokens, batch));
  // the most bytes of a cache that has read so many tokens, or fewer
  const most = (model, name) => (name in model.caches ? (tokens, batch) => coded(model.caches[name], tokens && tokens - (tokens - 1) % model.caches[name].tile, batch) : held(model, name));
  // the most that fits: bytes never fall; 0 where not even one does
  const largest = (bytes, room) => {
    let low = 0, high = MOST;
    while (low < high) {
      const middle = Math.floor((low + high + 1) / 2);
      if (bytes(middle) <= room) low = middle;
      else high = middle - 1;
    }
    return low;
  };
  const row = (data, model, gpu, name, tokens, batch) => {
    const m = data.models[model], [memory, bandwidth] = data.gpus[gpu], bytes = held(m, name), least = most(m, name);
    const room = memory - m.weights - data.reserve, now = bytes(tokens, batch);
    return {
      nbytes: now,
      fits: now <= room,
      largest_context: largest(n => least(n, batch), room),
      largest_batch: largest(n => bytes(tokens, n), room),
      tokens_s: (batch * bandwidth) / (m.weights + now), // every byte of weights and cache is read once a step
    };
  };
  window.tqPlan = {row};

  const box = document.getElementById("tq-plan");
  if (!box) return;
  const data = JSON.parse(document.getElementById("tq-plan-data").textContent), at = k => box.querySelector(`[data-k=${k}]`);
  const count = n => (n >= MOST ? "any" : n ? n.toLocaleString("en") : "none");
  const show = () => {
    const model = at("model").value, gpu = at("gpu").value, tokens = 2 ** at("tokens").value, batch = 2 ** at("batch").value;
    box.querySelector("[data-o=tokens]").textContent = `${tokens.toLocaleString("en")} tokens`;
    box.querySelector("[data-o=batch]").textContent = batch;
    for (const line of box.querySelectorAll("tbody tr")) {
      const found = row(data, model, gpu, line.dataset.name, tokens, batch), [, bytes, context, sequences, speed] = line.cells;
      bytes.textContent = (found.nbytes / 1e9).toFixed(2);
      context.textContent = count(found.largest_context);
      sequences.textContent = count(found.largest_batch);
      speed.textContent = found.fits ? Math.floor(found.tokens_s).toLocaleString("en") : "does not fit";
      if (line.dataset.name === box.dataset.shown) box.dataset.value = found.nbytes;
    }
  };
  box.querySelector("[data-k=still]").hidden = true; // it names the first choice
  box.querySelector("[data-k=controls]").hidden = false;
  box.addEventListener("input", show);
  show();
})();
