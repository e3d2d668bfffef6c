// What the pages of the site do beyond text: shared by Quarto and scripts/tools/preview_docs.py. Without it everything stays open and readable.
(() => {
  const LONG = 30; // lines of source that may stand open
  const wrap = (node, summary, cls) => {
    const details = document.createElement("details"), head = document.createElement("summary");
    details.className = cls;
    head.textContent = summary;
    node.replaceWith(details);
    details.append(head, node);
  };

  // Long source is folded under the names that it defines; signatures, examples and their results stay.
  for (const block of document.querySelectorAll("main div.sourceCode")) {
    const text = block.textContent.trimEnd(), lines = text.split("\n").length;
    if (lines <= LONG || block.closest("details")) continue;
    const names = [...text.matchAll(/^(?:class|(?:async )?def)\s+(\w+)/gm)].map(m => m[1]);
    wrap(block, `Source${names.length ? " of " + names.slice(0, 4).join(", ") + (names.length > 4 ? " …" : "") : ""}, ${lines} lines`, "tq-source");
  }

  // `raised …` lines are tests of refusals that passed: they are counted, and shown on request.
  for (const code of document.querySelectorAll(".cell-output pre code, .cell-output-stdout pre code")) {
    const lines = code.textContent.split("\n"), raised = lines.filter(x => /^raised \w+: /.test(x));
    if (!raised.length || code.closest("details")) continue;
    const pre = code.closest("pre"), copy = pre.cloneNode(false), inner = document.createElement("code");
    code.textContent = lines.filter(x => !raised.includes(x)).join("\n");
    inner.textContent = raised.join("\n");
    copy.append(inner);
    pre.after(copy);
    if (!code.textContent.trim()) pre.remove();
    wrap(copy, raised.length === 1 ? "refused or told apart, as it must be" : `${raised.length} cases refused or told apart, as they must be`, "tq-raised");
  }

  // Tables with a head and several rows are sorted by a click on the head; numbers by their value.
  const value = cell => {
    const text = cell.textContent.trim().replaceAll(",", ""), number = text.match(/^[+−-]?\.?\d[\d.]*/);
    return number ? parseFloat(number[0].replace("−", "-")) : text.toLowerCase();
  };
  for (const table of document.querySelectorAll("main table")) {
    const heads = [...table.querySelectorAll("thead th")], body = table.tBodies[0];
    if (!body || body.rows.length < 4 || !heads.some(x => x.textContent.trim())) continue;
    heads.forEach((head, column) => {
      head.tabIndex = 0;
      const sort = () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach(x => x.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [a, b].map(row => value(row.cells[column] || head));
          return (typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === "number" ? -1 : 1) * (up ? 1 : -1);
        });
        body.append(...rows);
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
    });
  }

  // A link to a method that has no section of its own leads to its class or function.
  const find = () => {
    const name = decodeURIComponent(location.hash.slice(1));
    if (name && !document.getElementById(name) && name.includes(".")) document.getElementById(name.split(".")[0])?.scrollIntoView();
  };
  addEventListener("hashchange", find);
  find();
})();
