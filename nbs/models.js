// The table of models: a row stays while its names hold every word that is typed, however it is spelt (qwen3, Qwen 3, qwen-3).
// Without it the page shows all rows, and no field.
(() => {
  const plain = text => text.toLowerCase().replace(/[\s._-]/g, "");
  const matches = (names, typed) => typed.trim().split(/\s+/).every(word => plain(names).includes(plain(word)));
  window.tqModels = {matches};

  const box = document.getElementById("tq-models");
  if (!box) return;
  const field = box.querySelector("input"), count = box.querySelector("[role=status]"), rows = [...box.querySelectorAll("tbody tr")];
  const show = () => {
    const found = rows.filter(row => matches(`${row.cells[0].textContent} ${row.cells[row.cells.length - 1].textContent}`, field.value));
    for (const row of rows) row.hidden = true;
    for (const row of found) row.hidden = false;
    count.textContent = found.length ? `${found.length} of ${rows.length}` : "none by this name: see the end of the page";
  };
  box.querySelector("[data-k=search]").hidden = false;
  field.addEventListener("input", show);
  show();
})();
