// What the pages of the site do beyond text: shared by Quarto and scripts/tools/preview_docs.py. Without it everything stays open and readable.
(() => {
  const results = /^\s*9\d/.test(document.querySelector("main h1")?.textContent); // a page of results shows what was found; its code waits
  const LONG = results ? 0 : matchMedia("(max-width: 767px)").matches ? 8 : 30; // lines of source that may stand open
  const wrap = (node, summary, cls) => {
    const details = document.createElement("details"), head = document.createElement("summary");
    details.className = cls;
    head.textContent = summary;
    node.replaceWith(details);
    details.append(head, node);
  };

  // Quarto's search is a button without a name.
  document.querySelectorAll("#quarto-search button:not([aria-label])").forEach(x => x.setAttribute("aria-label", "Search"));

  // Exported source has a fold of its own, which stands open where it is short.
  for (const fold of document.querySelectorAll("main details[open]:has(div.sourceCode)"))
    if (fold.querySelector("div.sourceCode").textContent.trimEnd().split("\n").length > LONG) fold.open = false;

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

  // The first mention of a word of the glossary on a page says what it means. glossary.js is made from book.ipynb.
  const glossary = Object.entries(window.tqGlossary || {}).map(([name, meaning]) => [name.toLowerCase(), meaning]);
  const main = document.querySelector("main"), left = new Map(/(^|\/)book\.html$/.test(location.pathname) ? [] : glossary);
  if (main && left.size) {
    const names = [...left.keys()].sort((a, b) => b.length - a.length).map(x => x.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    const pattern = new RegExp(`(?<![\\w-])(${names.join("|")})s?(?![\\w-])`, "gi"), texts = [];
    const skip = "a, code, pre, math, .katex, h1, h2, h3, h4, th, summary, figcaption, script, style, svg, .tq-live, .dataframe";
    const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT, n => n.parentElement.closest("p, li, td") && !n.parentElement.closest(skip) ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT);
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const node of texts) {
      const parts = [], text = node.textContent;
      let end = 0;
      for (const found of text.matchAll(pattern)) {
        const name = found[1].toLowerCase(), meaning = left.get(name);
        if (!meaning) continue;
        left.delete(name);
        const term = document.createElement("dfn");
        term.className = "tq-term";
        term.tabIndex = 0;
        term.textContent = found[0];
        term.dataset.name = name;
        term.dataset.tip = meaning;
        term.setAttribute("aria-label", `${found[0]}: ${meaning}`);
        parts.push(text.slice(end, found.index), term);
        end = found.index + found[0].length;
      }
      if (parts.length) node.replaceWith(...parts, text.slice(end));
    }
  }

  // `equation (13.2)` leads to the display that carries \tag{13.2}: MathML of the preview, KaTeX's source or its result.
  for (const display of document.querySelectorAll("main .math.display, main .katex-display")) {
    const tag = display.textContent.match(/\\tag\{([^{}]+)\}/);
    if (tag && !document.getElementById(`eq-${tag[1]}`)) display.id = `eq-${tag[1]}`;
  }
  const cited = document.createTreeWalker(document.querySelector("main") || document.body, NodeFilter.SHOW_TEXT, n => /[Ee]quations? \(/.test(n.textContent) && !n.parentElement.closest("a, code, pre, script, style") ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT), mentions = [];
  while (cited.nextNode()) mentions.push(cited.currentNode);
  for (const node of mentions) {
    const parts = node.textContent.split(/\((\d\d[a-z]?\.\d+)\)/).map((text, i) => {
      if (i % 2 === 0) return text;
      if (!document.getElementById(`eq-${text}`)) return `(${text})`;
      const link = document.createElement("a");
      link.href = `#eq-${text}`;
      link.textContent = `(${text})`;
      return link;
    });
    node.replaceWith(...parts);
  }

  // What scrolls within itself can be reached by the keyboard.
  const reach = () => {
    for (const x of document.querySelectorAll("main :is(pre, table, p, li, math, .katex-display, div.sourceCode)"))
      if (x.scrollWidth > x.clientWidth && /auto|scroll/.test(getComputedStyle(x).overflowX)) x.tabIndex = 0;
  };
  addEventListener("load", reach);
  addEventListener("resize", reach);
  document.addEventListener("toggle", reach, true);

  // On a phone a page of more than sixteen screens is a list of its sections: a tap opens one, so does a link into it.
  // What comes before the first figure stays open, if that is not long itself.
  const under = head => { // pandoc sets what follows beside a heading, Quarto in its section
    const found = [];
    for (let x = head.nextSibling; x && !(/^H[1-6]$/.test(x.nodeName) && x.nodeName <= head.nodeName); x = x.nextSibling) found.push(x);
    return found;
  };
  const foldAt = head => {
    const details = document.createElement("details"), summary = document.createElement("summary"), rest = under(head);
    details.className = "tq-section";
    head.before(details);
    summary.append(head);
    details.append(summary, ...rest);
    return details;
  };
  if (main && matchMedia("(max-width: 767px)").matches && main.clientHeight > 16 * innerHeight) {
    const heads = [...main.querySelectorAll("h2")].filter(x => !x.closest("details, nav, header, .tq-live"));
    const shown = x => x.matches?.("figure, :has(figure img)");
    const tall = heads.map(x => x.getBoundingClientRect().top).map((top, i, tops) => ((tops[i + 1] || main.getBoundingClientRect().bottom) - top) / innerHeight);
    const upTo = n => tall.slice(0, n).reduce((a, x) => a + x, 0), first = heads.findIndex(x => under(x).some(shown));
    const open = first >= 0 && upTo(first + 1) < 6 ? first + 1 : tall[0] < 3 ? 1 : 0;
    heads.forEach((head, i) => {
      if (i < open) return;
      const details = foldAt(head);
      if (tall[i] > 5) [...details.querySelectorAll("h3")].forEach(foldAt);
    });
  }

  // A link opens what it leads into; one to a method that has no section of its own leads to its class or function.
  const find = () => {
    const name = decodeURIComponent(location.hash.slice(1)), target = document.getElementById(name) || document.getElementById(name.split(".")[0]);
    if (!name || !target) return;
    let folded = target.id !== name;
    for (let x = target.querySelector(":scope > details.tq-section") || target.closest("details"); x; x = x.parentElement.closest("details")) if (!x.open) folded = x.open = true;
    if (folded) target.scrollIntoView();
  };
  addEventListener("hashchange", find);
  find();
})();
