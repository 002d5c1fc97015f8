/**
 * Markdown as DOM nodes. The model's text becomes text nodes only, and addresses only of http, https and mailto, so that markup
 * and scripts stay text. Images become links: the page fetches nothing.
 */
import { copyButton, element } from "./dom.js";

const DEEPEST = 8; // quotes, lists and emphasis within each other
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const SPECIAL = /[\\`*_~![<]|https?:\/\//g;
const LINK = /!?\[((?:[^[\]\\]|\\.)*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`)\]]+/y;
const BREAK = /<br\s*\/?>/iy;

/** @type {WeakMap<Element, string[]>} the source of each child */
const shown = new WeakMap();

/** Show text; unchanged blocks keep their nodes. @param {Element} target @param {string} text */
export function render(target, text) {
  const sources = split(text);
  const before = shown.get(target) ?? [];
  let same = 0;
  while (same < before.length && before[same] === sources[same]) same++;
  while (target.childNodes.length > same) target.lastChild?.remove();
  target.append(...sources.slice(same).map((source) => block(source, 0)));
  shown.set(target, sources);
}

// ---- blocks -----------------------------------------------------------------------------------------------------

/** The sources of blocks, in order. @param {string} text */
function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const end = lines[at].trim() ? endOf(lines, at) : at + 1;
    if (lines[at].trim()) found.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return found;
}

/** @param {string[]} lines @param {number} at */
function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  const below = lines[at + 1] ?? "";
  if (line.includes("|") && below.includes("|") && DELIMITERS.test(below)) return "table";
  return "text";
}

/** The end of the block that begins at a line. @param {string[]} lines @param {number} at */
function endOf(lines, at) {
  const kind = kindOf(lines, at);
  let end = at + 1;
  if (kind === "fence") {
    const mark = /** @type {any} */ (FENCE.exec(lines[at]))[1];
    while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ""))) end++;
    return Math.min(end + 1, lines.length);
  }
  if (kind === "quote") while (end < lines.length && QUOTE.test(lines[end])) end++;
  if (kind === "table") while (end < lines.length && lines[end].includes("|")) end++;
  if (kind === "text") while (end < lines.length && lines[end].trim() && kindOf(lines, end) === "text") end++;
  if (kind === "list") while (end < lines.length && inList(lines, at, end)) end++;
  return end;
}

/** Whether a line belongs to the list that began earlier.
 * @param {string[]} lines @param {number} first @param {number} at @returns {boolean} */
function inList(lines, first, at) {
  const line = lines[at];
  if (!line.trim()) return at + 1 < lines.length && lines[at + 1].trim() !== "" && inList(lines, first, at + 1);
  const [, indent, mark] = /** @type {RegExpExecArray} */ (ITEM.exec(lines[first]));
  const item = ITEM.exec(line);
  if (item && !RULE.test(line)) return item[1].length > indent.length || /\d/.test(item[2]) === /\d/.test(mark);
  if (/^\s/.test(line) && line.search(/\S/) > indent.length) return true;
  return lines[at - 1].trim() !== "" && kindOf(lines, at) === "text";
}

/** One node for the source of one block. @param {string} source @param {number} depth @returns {HTMLElement} */
function block(source, depth) {
  const lines = source.split("\n");
  const kind = depth < DEEPEST ? kindOf(lines, 0) : "text";
  if (kind === "fence") return fence(lines);
  if (kind === "rule") return element("hr");
  if (kind === "heading") {
    const [, { length }, text] = /** @type {any} */ (HEADING.exec(lines[0]));
    return element(/** @type {"h3"} */ (`h${Math.min(length + 2, 6)}`), {}, inline(text)); // the page has h1 and h2
  }
  if (kind === "quote") return element("blockquote", {}, inner(lines.map((line) => line.replace(QUOTE, "")), depth));
  if (kind === "table") return table(lines);
  if (kind === "list") return list(lines, depth);
  return element("p", {}, inline(source.trim()));
}

/** @param {string[]} lines @param {number} depth */
function inner(lines, depth) {
  return split(lines.join("\n")).map((source) => block(source, depth + 1));
}

/** @param {string[]} lines */
function fence(lines) {
  const [, mark, language] = /** @type {RegExpExecArray} */ (FENCE.exec(lines[0]));
  const closed = lines.length > 1 && lines[lines.length - 1].trim().startsWith(mark);
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const label = language ? `Code, ${language}` : "Code";
  return element("figure", { className: "code" }, [
    element("figcaption", {}, [element("span", { textContent: language }), copyButton("Copy the code", () => code)]),
    element("pre", { tabIndex: 0, role: "region", ariaLabel: label }, [element("code", { textContent: code })]),
  ]);
}

/** @param {string[]} lines */
function table([head, delimiters, ...rows]) {
  const sides = cells(delimiters).map((each) => (/-:$/.test(each) ? (each[0] === ":" ? "middle" : "right") : ""));
  const row = (/** @type {"th" | "td"} */ name, /** @type {string} */ line) => {
    const texts = cells(line);
    return element("tr", {}, sides.map((className, column) => element(name, { className }, inline(texts[column] ?? ""))));
  };
  return element("div", { className: "table", tabIndex: 0, role: "region", ariaLabel: "Table" }, [
    element("table", {}, [
      element("thead", {}, [row("th", head)]),
      element("tbody", {}, rows.map((line) => row("td", line))),
    ]),
  ]);
}

/** @param {string} line */
function cells(line) {
  return line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((each) => each.trim().replaceAll("\\|", "|"));
}

/** @param {string[]} lines @param {number} depth */
function list(lines, depth) {
  const [, indent, mark] = /** @type {RegExpExecArray} */ (ITEM.exec(lines[0]));
  /** @type {string[][]} */
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1 && (!items.length || item[1].length < width)) {
      width = item[0].length;
      items.push([line.slice(width)]);
    } else {
      items[items.length - 1].push(line.slice(Math.min(width, Math.max(0, line.search(/\S/)))));
    }
  }
  const children = items.map((each) => element("li", {}, inner(each, depth)));
  if (/\d/.test(mark)) return element("ol", { start: parseInt(mark, 10) }, children);
  return element("ul", {}, children);
}

// ---- inside a line ----------------------------------------------------------------------------------------------

/** @param {string} text @param {number} [depth] @returns {(Node | string)[]} */
function inline(text, depth = 0) {
  /** @type {(Node | string)[]} */
  const nodes = [];
  /** @type {Set<string>} marks that nothing closes from here on */
  const open = new Set();
  let plain = "";
  for (let at = 0; at < text.length; ) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    const found = at < text.length && depth < DEEPEST ? span(text, at, open, depth) : null;
    if (found) {
      nodes.push(plain, found[0]);
      plain = "";
      at = found[1];
    } else {
      plain += text.slice(at, ++at);
    }
  }
  return [...nodes, plain].filter((each) => each !== "");
}

/** The node that begins here, and the end of its source. @param {string} text @param {number} at @param {Set<string>} open
 * @param {number} depth @returns {[Node | string, number] | null} */
function span(text, at, open, depth) {
  const first = text[at];
  if (first === "\\") return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null;
  if (first === "`") return codeSpan(text, at, open);
  if (first === "<") return match(BREAK, text, at) ? [element("br"), BREAK.lastIndex] : null;
  if (first === "[" || first === "!") {
    const found = match(LINK, text, at);
    return found && link(found[2], inline(found[1] || found[2], DEEPEST - 1), at + found[0].length);
  }
  if (first === "h") {
    const address = match(ADDRESS, text, at)?.[0].replace(/[.,;:!?*_~]+$/, "") ?? "";
    return link(address, [address], at + address.length);
  }
  return emphasis(text, at, open, depth);
}

/** @param {RegExp} pattern @param {string} text @param {number} at */
function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** @param {string} text @param {number} at @param {Set<string>} open @returns {[Node | string, number] | null} */
function codeSpan(text, at, open) {
  let from = at;
  while (text[from] === "`") from++;
  const mark = text.slice(at, from);
  if (open.has(mark)) return [mark, from];
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end)) {
    let after = end;
    while (text[after] === "`") after++;
    if (after - end === mark.length) return [element("code", { textContent: text.slice(from, end).trim() }), after];
    end = after;
  }
  open.add(mark);
  return [mark, from];
}

/** @param {string} text @param {number} at @param {Set<string>} open @param {number} depth
 * @returns {[Node | string, number] | null} */
function emphasis(text, at, open, depth) {
  const first = text[at];
  const both = text.startsWith(first.repeat(3), at); // ***both***: the outer mark is a single one
  const mark = text[at + 1] === first && !both ? first + first : first;
  const from = at + mark.length;
  const word = first === "_" && /\w/.test(text[at - 1] ?? "");
  if (mark === "~" || mark === "!" || open.has(mark) || word || !/\S/.test(text[from] ?? "")) return null;
  for (let end = text.indexOf(mark, from + (both ? 2 : 1)); end >= 0; end = text.indexOf(mark, end + mark.length)) {
    while (mark.length === 2 && text[end + 2] === first) end++; // **a *b*** ends with the outer mark
    const inner = mark.length === 1 && text[end + 1] === first;
    if (inner) end++;
    if (inner || /\s/.test(text[end - 1]) || (first === "_" && /\w/.test(text[end + mark.length] ?? ""))) continue;
    const name = first === "~" ? "del" : mark.length === 2 ? "strong" : "em";
    return [element(name, {}, inline(text.slice(from, end), depth + 1)), end + mark.length];
  }
  open.add(mark);
  return null;
}

/** @param {string} address @param {(Node | string)[]} children @param {number} end @returns {[Node, number] | null} */
function link(address, children, end) {
  if (!/^(https?:\/\/|mailto:)/i.test(address) || !URL.canParse(address)) return null;
  return [element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, children), end];
}
