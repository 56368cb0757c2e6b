// Runs in a world of its own in each page: the page's scripts can neither see nor change it. `crib` is its only name.
(() => {
  const MAX_NODES = 80000, MAX_CHARS = 1500000, MAX_DEPTH = 1200, MAX_MS = 4000, MAX_OPTIONS = 40, MAX_FRAME_DEPTH = 4;
  const elements = new Map(), references = new WeakMap();
  let nextReference = 1;

  const reference = (element) => {
    let name = references.get(element);
    if (!name) {
      name = `e${nextReference++}`;
      references.set(element, name);
      elements.set(name, new WeakRef(element));
    }
    return name;
  };
  const find = (name) => {
    const element = elements.get(name)?.deref();
    return element?.isConnected ? element : null;
  };
  const squeeze = (text) => (text || "").replace(/\s+/g, " ").trim();
  const clip = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const quoted = (text) => JSON.stringify(clip(squeeze(text), 200));

  const BLOCKS = new Set(("ADDRESS ARTICLE ASIDE BLOCKQUOTE BODY CENTER DD DETAILS DIALOG DIV DL DT FIELDSET FIGCAPTION FIGURE FOOTER FORM " +
    "H1 H2 H3 H4 H5 H6 HEADER HR HTML LEGEND LI MAIN MENU NAV OL P PRE SECTION SUMMARY TABLE TBODY TFOOT THEAD TR UL").split(" "));
  const SKIPPED = new Set("SCRIPT STYLE NOSCRIPT TEMPLATE HEAD TITLE META LINK OBJECT EMBED CANVAS AUDIO VIDEO DATALIST OPTION OPTGROUP".split(" "));
  const ROLES = new Set("button link checkbox radio switch tab menuitem menuitemcheckbox menuitemradio option combobox slider treeitem".split(" "));

  const label = (field) => field.getAttribute("aria-label") || (field.labels?.[0]?.textContent ?? "") || field.placeholder || field.title ||
    field.getAttribute("name") || "";

  class Writer {
    constructor() {
      this.pieces = []; this.chars = 0; this.nodes = 0; this.line = ""; this.marker = ""; this.indent = ""; this.gap = false;
      this.until = performance.now() + MAX_MS; this.cut = false; this.pre = 0;
    }
    text(text) {
      if (this.pre) { this.line += text; return; }
      this.line += text.length > 200000 ? text.slice(0, 200000) : text;
    }
    flush() {
      const line = this.pre ? this.line.replace(/\s+$/, "") : squeeze(this.line);
      this.line = "";
      if (!line) return;
      if (this.gap && this.pieces.length) this.push("\n");
      this.gap = false;
      this.push(this.indent + this.marker + line + "\n");
      if (this.marker) { this.indent = this.indent + " ".repeat(this.marker.startsWith("#") ? 0 : this.marker.length); this.marker = ""; }
    }
    push(piece) {
      this.chars += piece.length;
      if (this.chars > MAX_CHARS) this.cut = true;
      else this.pieces.push(piece);
    }
    get full() {
      this.nodes += 1;
      if (this.nodes > MAX_NODES || (this.nodes % 256 === 0 && performance.now() > this.until)) this.cut = true;
      return this.cut;
    }
  }

  const field = (element) => {
    const tag = element.tagName, name = reference(element), off = element.disabled ? " disabled" : "";
    if (tag === "SELECT") {
      const options = [...element.options].slice(0, MAX_OPTIONS).map((o) => (o.selected ? `*${clip(squeeze(o.text), 60)}*` : clip(squeeze(o.text), 60)));
      const more = element.options.length > MAX_OPTIONS ? `, … ${element.options.length} in all` : "";
      return ` (select ${quoted(label(element))}${off}: ${options.join(", ")}${more}) [${name}] `;
    }
    if (tag === "TEXTAREA") return ` (text area ${quoted(label(element))}${off} value=${quoted(element.value)}) [${name}] `;
    const type = (element.type || "text").toLowerCase();
    if (type === "hidden") return "";
    if (type === "checkbox" || type === "radio") return ` (${type} ${quoted(label(element))}${element.checked ? " checked" : ""}${off}) [${name}] `;
    if (["submit", "button", "reset", "image"].includes(type)) {
      return ` (button ${quoted(element.value || element.alt || label(element) || type)}${off}) [${name}] `;
    }
    if (type === "file") return ` (file field ${quoted(label(element))}, can't be filled) [${name}] `;
    const value = type === "password" ? (element.value ? "•••" : "") : element.value;
    return ` (${type} field ${quoted(label(element))}${off} value=${quoted(value)}) [${name}] `;
  };

  const children = (node) => (node.shadowRoot ? node.shadowRoot.childNodes : node.tagName === "SLOT" && node.assignedNodes().length ? node.assignedNodes() : node.childNodes);

  const walkAll = (nodes, writer, depth, frames) => {
    for (const node of nodes) {
      if (writer.full) return;
      walk(node, writer, depth, frames);
    }
  };

  const walk = (node, writer, depth, frames) => {
    if (node.nodeType === Node.TEXT_NODE) { writer.text(node.data); return; }
    if (node.nodeType !== Node.ELEMENT_NODE || depth > MAX_DEPTH) return;
    const tag = node.tagName.toUpperCase();
    if (SKIPPED.has(tag)) return;
    const style = getComputedStyle(node);
    if (style.display === "none" || (style.visibility !== "visible" && !node.childElementCount)) return;
    if (tag === "BR") { if (writer.pre) writer.line += "\n"; else writer.flush(); return; }
    if (tag === "HR") { writer.flush(); writer.text("---"); writer.flush(); return; }
    if (tag === "IMG" || tag.toLowerCase() === "svg") {
      const words = squeeze(node.getAttribute("alt") || node.getAttribute("aria-label") || "");
      if (words) writer.text(` ![${clip(words, 200)}] `);
      return;
    }
    if (tag === "INPUT" || tag === "SELECT" || tag === "TEXTAREA") { writer.text(field(node)); return; }
    if (tag === "IFRAME" || tag === "FRAME") { frame(node, writer, depth, frames); return; }
    const role = (node.getAttribute("role") || "").toLowerCase();
    if (tag === "A" && node.hasAttribute("href")) { link(node, writer, depth, frames); return; }
    if (tag === "BUTTON" || (tag !== "SUMMARY" && ROLES.has(role))) {
      const kind = tag === "BUTTON" ? "button" : role;
      const state = node.getAttribute("aria-checked") === "true" || node.getAttribute("aria-selected") === "true" ? " on" : "";
      const words = squeeze(node.innerText || node.getAttribute("aria-label") || node.title || "");
      writer.text(` (${kind} ${quoted(words)}${state}${node.disabled ? " disabled" : ""}) [${reference(node)}] `);
      return;
    }
    const before = writer.indent, block = BLOCKS.has(tag) || style.display === "block" || style.display === "flex" || style.display === "grid";
    if (block) { writer.flush(); if (tag !== "LI" && tag !== "TR" && tag !== "DIV") writer.gap = true; }
    if (/^H[1-6]$/.test(tag)) writer.marker = "#".repeat(Number(tag[1])) + " ";
    else if (tag === "LI") writer.marker = node.parentElement?.tagName === "OL" ? `${[...node.parentElement.children].indexOf(node) + 1}. ` : "- ";
    else if (tag === "BLOCKQUOTE") writer.indent += "> ";
    else if (tag === "PRE") { writer.push((writer.pieces.length ? "\n" : "") + "```\n"); writer.gap = false; writer.pre += 1; }
    else if (tag === "TD" || tag === "TH") writer.text("| ");
    else if (tag === "STRONG" || tag === "B") writer.text("**");
    walkAll(children(node), writer, depth + 1, frames);
    if (tag === "STRONG" || tag === "B") writer.text("**");
    else if (tag === "TD" || tag === "TH") writer.text(" ");
    else if (tag === "SUMMARY" || node.isContentEditable && !node.parentElement?.isContentEditable) writer.text(` [${reference(node)}] `);
    if (block) { writer.flush(); if (tag !== "LI" && tag !== "TR" && tag !== "DIV") writer.gap = true; writer.marker = ""; }
    if (tag === "PRE") { writer.pre -= 1; writer.push("```\n"); }
    writer.indent = before;
  };

  const link = (node, writer, depth, frames) => {
    const held = writer.line;
    writer.line = "";
    const inner = new Writer();
    inner.until = writer.until;
    walkAll(children(node), inner, depth + 1, frames);
    inner.flush();
    writer.nodes += inner.nodes;
    writer.line = held;
    const words = squeeze(inner.pieces.join(" ")) || squeeze(node.getAttribute("aria-label") || node.title || "");
    if (!words) return;
    const target = /^https?:/.test(node.href) ? clip(node.href, 500) : node.protocol;
    writer.text(` [${clip(words, 500)}](${target}) [${reference(node)}] `);
  };

  const frame = (node, writer, depth, frames) => {
    let inside = null;
    try { inside = node.contentDocument; } catch { inside = null; }
    writer.flush();
    const source = clip(node.src || "about:blank", 300);
    if (inside?.body && frames < MAX_FRAME_DEPTH) {
      walkAll(inside.body.childNodes, writer, depth + 1, frames + 1);
      writer.flush();
    } else if (/^https?:/.test(source)) {
      writer.text(`(a frame of another site: ${source})`);
      writer.flush();
    }
  };

  const place = () => ({
    y: Math.round(scrollY), height: Math.round(document.scrollingElement?.scrollHeight ?? 0), view: innerHeight,
  });

  const shown = (element) => element === document.documentElement ? "page" :
    clip(`<${element.tagName.toLowerCase()}${element.id ? ` id=${element.id}` : ""}> ${squeeze(element.innerText)}`, 120);

  const deepest = (x, y) => {
    let found = document.elementFromPoint(x, y), root = document, left = 0, top = 0;
    for (let step = 0; found && step < 20; step += 1) {
      if (found.shadowRoot && found.shadowRoot !== root) {
        const within = found.shadowRoot.elementFromPoint(x - left, y - top);
        if (!within || within === found) break;
        root = found.shadowRoot; found = within;
      } else if (found.tagName === "IFRAME" || found.tagName === "FRAME") {
        let inside = null;
        try { inside = found.contentDocument; } catch { inside = null; }
        if (!inside) break;
        const box = found.getBoundingClientRect();
        left += box.left + found.clientLeft; top += box.top + found.clientTop;
        const within = inside.elementFromPoint(x - left, y - top);
        if (!within) break;
        root = inside; found = within;
      } else break;
    }
    return found;
  };

  const contains = (outer, inner) => {
    for (let node = inner; node; node = node.parentNode ?? node.host ?? null) if (node === outer) return true;
    return false;
  };

  globalThis.crib = {
    read() {
      const writer = new Writer();
      if (document.body) walk(document.body, writer, 0, 0);
      writer.flush();
      return { text: writer.pieces.join("").trim(), cut: writer.cut, title: clip(squeeze(document.title), 300), ...place(),
        type: document.contentType };
    },

    // Where to click an element, in the coordinates of the window.
    point(name) {
      const element = find(name);
      if (!element) return { problem: "gone" };
      if (element.disabled) return { problem: "disabled" };
      element.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
      const boxes = element.getClientRects(), box = boxes[0];
      if (!box || box.width < 1 || box.height < 1) return { problem: "hidden" };
      let x = box.left + box.width / 2, y = box.top + box.height / 2;
      for (let view = element.ownerDocument.defaultView; view !== window && view?.frameElement; view = view.parent) {
        const outer = view.frameElement.getBoundingClientRect();
        x += outer.left + view.frameElement.clientLeft; y += outer.top + view.frameElement.clientTop;
      }
      const hit = deepest(x, y);
      if (hit && !contains(element, hit) && !contains(hit, element) && hit.control !== element && ![...(element.labels ?? [])].some((l) => contains(l, hit))) {
        return { problem: "covered", by: shown(hit) };
      }
      return { x, y, href: element.closest("a[href]")?.href ?? null, download: element.closest("a[href]")?.hasAttribute("download") ?? false };
    },

    // Makes a field ready for typing; one that takes no typing gets its value at once.
    focus(name, clear, text) {
      const element = find(name);
      if (!element) return { problem: "gone" };
      const editable = element.isContentEditable, tag = element.tagName;
      if (!editable && tag !== "INPUT" && tag !== "TEXTAREA") return { problem: "no field" };
      if (element.disabled || element.readOnly) return { problem: "disabled" };
      const type = tag === "INPUT" ? (element.type || "text") : "";
      if (["checkbox", "radio", "button", "submit", "reset", "image", "file", "hidden"].includes(type)) return { problem: type };
      element.scrollIntoView({ block: "center", behavior: "instant" });
      element.focus();
      if (["date", "time", "datetime-local", "month", "week", "color", "range"].includes(type)) {
        element.value = text;
        element.dispatchEvent(new Event("input", { bubbles: true }));
        element.dispatchEvent(new Event("change", { bubbles: true }));
        return element.value === text ? { done: true } : { problem: "value", takes: element.value };
      }
      if (clear) {
        if (editable) getSelection().selectAllChildren(element); else element.select();
        element.ownerDocument.execCommand("delete");
      }
      return {};
    },

    value(name) {
      const element = find(name);
      return element ? clip(element.type === "password" ? "•••" : element.value ?? element.innerText ?? "", 500) : null;
    },

    select(name, wanted) {
      const element = find(name);
      if (!element) return { problem: "gone" };
      if (element.tagName !== "SELECT") return { problem: "no select" };
      if (element.disabled) return { problem: "disabled" };
      const option = [...element.options].find((o) => squeeze(o.text) === squeeze(wanted) || o.value === wanted) ??
        [...element.options].find((o) => squeeze(o.text).toLowerCase() === squeeze(wanted).toLowerCase());
      if (!option || option.disabled) return { problem: "no option", options: [...element.options].slice(0, MAX_OPTIONS).map((o) => clip(squeeze(o.text), 80)) };
      element.value = option.value;
      option.selected = true;
      element.dispatchEvent(new Event("input", { bubbles: true }));
      element.dispatchEvent(new Event("change", { bubbles: true }));
      return { chosen: squeeze(option.text) };
    },

    scroll(to, name) {
      if (name) {
        const element = find(name);
        if (!element) return { problem: "gone" };
        element.scrollIntoView({ block: "center", behavior: "instant" });
        return place();
      }
      const step = Math.max(100, innerHeight * 0.85);
      if (to === "down") scrollBy({ top: step, behavior: "instant" });
      else if (to === "up") scrollBy({ top: -step, behavior: "instant" });
      else scrollTo({ top: to === "top" ? 0 : document.scrollingElement.scrollHeight, behavior: "instant" });
      return place();
    },

    has(text) {
      return squeeze(document.body?.innerText ?? "").includes(squeeze(text));
    },

    box(name) {
      const element = find(name);
      if (!element) return { problem: "gone" };
      element.scrollIntoView({ block: "nearest", behavior: "instant" });
      const box = element.getBoundingClientRect();
      return { x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height };
    },

    size: () => ({ width: Math.max(document.documentElement.scrollWidth, innerWidth), height: Math.max(document.documentElement.scrollHeight, innerHeight) }),
  };
})();
