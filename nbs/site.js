// What the pages of the site do beyond text: shared by Quarto and scripts/tools/preview_docs.py. Without it everything stays open and readable.
(() => {
  const title = document.querySelector("main h1")?.textContent || "", phone = matchMedia("(max-width: 767px)").matches;
  // Lines of source that may stand open: a page of results shows what was found, its code waits; what has no number is the Manual, whose code is to be typed.
  const LONG = /^\s*9\d/.test(title) ? 0 : phone && /^\s*\d/.test(title) ? 8 : 30;
  const wrap = (node, summary, cls) => {
    const details = document.createElement("details"), head = document.createElement("summary");
    details.className = cls;
    head.textContent = summary;
    node.replaceWith(details);
    details.append(head, node);
  };

  // Quarto's script makes the search after this one has run: a button and a box, both without a name.
  addEventListener("load", () => document.querySelectorAll("#quarto-search :is(button, .aa-Autocomplete)").forEach(x => (x.ariaLabel ||= "Search")));

  // What is found: a name of code that is the query, then the Manual, a plain word that is a name, the other shelves; `rank` is written by search_names.py.
  if (window.Fuse) {
    const search = Fuse.prototype.search;
    Fuse.prototype.search = function (query, options) {
      const words = query.trim().toLowerCase(), fields = item => [item.section || item.title, item.title, item.text].map(x => (x || "").toLowerCase());
      const place = ({item}) => {
        const [name, ...others] = fields(item);
        if (name === words && item.rank) return /[._]|[a-z][A-Z]/.test(query) ? -1 : 0.5;
        return [name, ...others].some(x => x.includes(words)) ? item.rank ?? 9 : 9;
      };
      const found = search.call(this, query, {...options, limit: -1}).map(x => [place(x), x]);
      return found.sort((a, b) => a[0] - b[0]).slice(0, options?.limit).map(x => x[1]); // of one place in Fuse's order
    };
  }

  // Exported source has a fold of its own, which stands open where it is short.
  for (const fold of document.querySelectorAll("main details[open]:has(div.sourceCode)"))
    if (fold.querySelector("div.sourceCode").textContent.trimEnd().split("\n").length > LONG) fold.open = false;

  // Long source is folded under the names that it defines; signatures, examples and their results stay.
  for (const block of document.querySelectorAll("main div.sourceCode")) {
    const text = block.textContent.trimEnd(), lines = text.split("\n").length;
    if (lines <= LONG || block.closest("details")) continue;
    const names = [...text.matchAll(/^(?:class|(?:async )?def)\s+(\w+)/gm)].map(m => m[1]);
    wrap(block, `Code${names.length ? " of " + names.slice(0, 4).join(", ") + (names.length > 4 ? " …" : "") : ""}, ${lines} lines`, "tq-source");
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

  // A line of an output that is too long for its column breaks, unless it is a row of a table.
  for (const pre of document.querySelectorAll(".cell-output pre"))
    if (!pre.textContent.split("\n").some(x => x.length > 90 && (x.trim().match(/ {2,}/g) || []).length > 2)) pre.classList.add("tq-wrap");

  // Numbers in tables: a column of them to the right, none broken, minus signs that are some.
  const NUMBER = /^[<>≤≥~≈±×+−]*\s*\.?\d[\d.,]*(?:\s?[%×xkMG])?(?:\s*(?:±|to|–|\/|of)\s*[+−]?\.?\d[\d.,]*\s?%?)*$/, NONE = /^[—–-]?$/;
  for (const table of document.querySelectorAll("main table")) {
    const rows = [...table.rows], body = rows.filter(row => row.querySelector("td"));
    for (const cell of body.flatMap(row => [...row.cells])) {
      const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT, n => (n.parentElement.closest("code, .katex, script, style") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT));
      while (walker.nextNode()) walker.currentNode.data = walker.currentNode.data.replace(/(^|[\s(±])-(?=\.?\d)/g, "$1−");
      if (cell.textContent.trim().length < 19 && /^[+−±]?\.?\d/.test(cell.textContent.trim())) cell.classList.add("tq-short");
    }
    for (let column = 0; column < (body[0]?.cells.length || 0); column++) {
      const texts = body.map(row => (row.cells[column]?.textContent || "").trim());
      if (texts.some(x => NUMBER.test(x)) && texts.every(x => NUMBER.test(x) || NONE.test(x))) rows.forEach(row => row.cells[column]?.classList.add("tq-number"));
    }
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

  // `equation (13.2)` leads to the display that carries \tag{13.2}: KaTeX's source or its result.
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

  // What scrolls within itself can be reached by the keyboard. One look a frame: a page whose folds all open at once toggles hundreds of times.
  let looks = 0;
  const reach = () => {
    const wide = [...document.querySelectorAll("main :is(pre, code, table, p, li, figure, math, .katex-display, div.sourceCode)")];
    for (const x of wide.filter(x => x.scrollWidth > x.clientWidth && /auto|scroll/.test(getComputedStyle(x).overflowX))) x.tabIndex = 0;
    looks = 0;
  };
  const look = () => { looks ||= requestAnimationFrame(reach); };
  addEventListener("resize", look);
  document.addEventListener("toggle", look, true);

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
  const foldSections = screen => {
    const heads = [...main.querySelectorAll("h2")].filter(x => !x.closest("details, nav, header, .tq-live"));
    const shown = x => x.matches?.("figure, :has(figure img)");
    const tall = heads.map(x => x.getBoundingClientRect().top).map((top, i, tops) => ((tops[i + 1] || main.getBoundingClientRect().bottom) - top) / screen);
    const upTo = n => tall.slice(0, n).reduce((a, x) => a + x, 0), first = heads.findIndex(x => under(x).some(shown));
    const open = first >= 0 && upTo(first + 1) < 6 ? first + 1 : tall[0] < 3 ? 1 : 0;
    heads.forEach((head, i) => {
      if (i < open) return;
      const details = foldAt(head);
      if (tall[i] > 5) [...details.querySelectorAll("h3")].forEach(foldAt);
    });
  };

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

  // Formulas and pictures have their size only now; a phone that shows a wide page smaller says a larger `innerHeight`.
  addEventListener("load", () => {
    // The number of an equation stands beside what scrolls, not at its far end.
    for (const tag of document.querySelectorAll("main .katex-display .katex-html > :is(.tag, .katex-tag)")) {
      const number = document.createElement("span"), display = tag.closest(".katex-display");
      number.className = "tq-tag";
      number.setAttribute("aria-hidden", "true"); // KaTeX says it in its MathML
      number.textContent = tag.textContent;
      tag.remove();
      display.classList.add("tq-tagged");
      display.parentElement.append(number);
    }
    const screen = Math.min(innerHeight, window.screen.height);
    if (main && phone && main.clientHeight > 16 * screen) {
      foldSections(screen);
      find();
    }
    reach();
  });
})();
