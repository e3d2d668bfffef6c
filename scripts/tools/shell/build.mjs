// Quarto's theme for both schemes, and the scripts that its pages load: node build.mjs NBS SETTINGS OUT, after
// `npm ci`; SETTINGS is what preview_docs.py found in _quarto.yml, themes in NBS.
// The files in quarto/ are Quarto's own, version 1.7.34; this puts them together as its src/core/sass.ts does, without
// what a page of ours has not: bslib, listings. Of its Bootstrap the files that differ in more than prefixes for old browsers lie
// there too; the others are npm's.
import {copyFileSync, mkdirSync, readFileSync, writeFileSync} from "node:fs";
import {createRequire} from "node:module";
import {dirname, join} from "node:path";
import {fileURLToPath} from "node:url";
import * as sass from "sass";

const [nbs, settingsFile, out] = process.argv.slice(2), here = dirname(fileURLToPath(import.meta.url));
const quarto = name => readFileSync(join(here, "quarto", name), "utf8");
const bootstrap = dirname(createRequire(import.meta.url).resolve("bootstrap/package.json"));

// A layer's sections: {functions, defaults, mixins, rules}.
const layer = text => {
  const found = {functions: "", defaults: "", mixins: "", rules: ""}, parts = text.split(/^\/\*-- *scss: *(\w+) *--\*\/$/m);
  for (let i = 1; i < parts.length; i += 2) found[parts[i] === "variables" ? "defaults" : parts[i]] += parts[i + 1];
  return found;
};
const {html, navbar} = JSON.parse(readFileSync(settingsFile, "utf8")), customize = layer(quarto("_bootstrap-customize.scss"));
const parts = ["quarto-nav.scss", "quarto-search.scss", "title-block.scss"].map(x => layer(quarto(x)));

// What `format: html` and the navbar of _quarto.yml say; Quarto writes them as variables.
const settings = `
$code-copy-selector: ${html["code-copy"] === true ? '""' : '"pre.sourceCode:hover > "'} !default;
$code-white-space: ${html["code-overflow"] === "wrap" ? "pre-wrap" : "pre"} !default; $tbl-cap-location: top !default;
$navbar-bg: ${navbar.background} !default; $navbar-fg: ${navbar.foreground} !default; $sidebar-border: false !default;
$sidebar-bg: if(variable-exists(body-bg), $body-bg, #fff) !default;`;
const grid = Object.entries({...html.grid, "column-gutter-width": html.grid["gutter-width"]}).map(([name, value]) => `$grid-${name}: ${value};`).join("\n");
const monospace = `
$font-family-monospace: SFMono-Regular, Menlo, Monaco, Consolas, "Liberation Mono", "Courier New", monospace !default;
:root { --quarto-font-monospace: #{inspect($font-family-monospace)}; }`;

const compile = names => {
  const theme = name => (name.endsWith(".scss") ? [layer(readFileSync(join(nbs, name), "utf8"))] : [layer(quarto(`${name}.scss`)), customize]);
  const user = names.flatMap(theme), each = (layers, name) => layers.map(x => x[name]).join("\n");
  const text = [
    quarto("_quarto-uses.scss"),
    `@import "functions";`, quarto("color-contrast.scss"),
    quarto("_quarto-functions.scss"), quarto("_bootstrap-functions.scss"), each(parts, "functions"), each(user, "functions"),
    each([...user].reverse(), "defaults"),
    each([...parts].reverse(), "defaults"), settings, quarto("_bootstrap-variables.scss"), quarto("_quarto-variables-copy-code.scss"),
    `@import "variables";`, grid,
    `@import "mixins";`, quarto("_bootstrap-mixins.scss"), each(parts, "mixins"), each(user, "mixins"),
    `@import "bootstrap";`,
    quarto("_quarto-rules.scss"), quarto("_quarto-rules-copy-code.scss"), quarto("_bootstrap-rules.scss"), monospace,
    quarto("_quarto-rules-link-external.scss"), each(parts, "rules"), each(user, "rules"),
  ].join("\n\n");
  return sass.compileString(text, {loadPaths: [join(here, "quarto"), join(bootstrap, "scss")], style: "compressed", logger: sass.Logger.silent}).css;
};

mkdirSync(out, {recursive: true});
writeFileSync(join(out, "bootstrap.css"), compile(html.theme.light));
writeFileSync(join(out, "bootstrap-dark.css"), compile(html.theme.dark));
// code as Quarto's theme `arrow` colours it, as far as styles.css does not; the room of an icon, whose font is not here
const code = colour => `pre > code.sourceCode > span, code span, code.sourceCode > span, div.sourceCode, div.sourceCode pre.sourceCode { color: ${colour}; }`;
writeFileSync(join(out, "code.css"), `${code("#003B4F")}\n.bi::before { display: inline-block; width: 1em; height: 1em; content: ""; }\n`);
writeFileSync(join(out, "code-dark.css"), code("#f8f8f2"));
for (const name of ["quarto-nav.js", "headroom.min.js", "quarto-search.js"]) copyFileSync(join(here, "quarto", name), join(out, name));
// the script of the switch is a template: `<% code %>`, `<%= value %>`
const filled = quarto("quarto-html-before-body.ejs").split(/<%|%>/).map((x, i) => (i % 2 === 0 ? `out += ${JSON.stringify(x)};` : x[0] === "=" ? `out += ${x.slice(1)};` : x));
const fill = new Function("darkMode", "darkModeDefault", "respectUserColorScheme", `let out = ""; ${filled.join("\n")} return out;`);
writeFileSync(join(out, "before-body.html"), fill(false, false, html["respect-user-color-scheme"] === true));
const npm = {"bootstrap.js": "bootstrap/dist/js/bootstrap.bundle.min.js", "autocomplete.js": "@algolia/autocomplete-js/dist/umd/index.production.js", "fuse.js": "fuse.js/dist/fuse.min.js"};
for (const [name, path] of Object.entries(npm)) copyFileSync(join(here, "node_modules", path), join(out, name));
