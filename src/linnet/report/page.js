"use strict";

// Text that a spreadsheet would take for a formula gets an apostrophe before it; numbers stay numbers.
const FORMULA = /^[=+\-@\t\r\n]/;
const FEW = 12; // rows that need no filter

function made(tag, properties = {}, parent = null) {
  const element = Object.assign(document.createElement(tag), properties);
  if (parent) parent.append(element);
  return element;
}

// The number behind a cell where it has one, else its text.
function valueOf(cell) {
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  return cell.textContent.trim();
}

function compare(first, second) {
  if (typeof first === "number" && typeof second === "number") return first - second;
  if (typeof first === "number") return -1; // numbers before what is missing
  if (typeof second === "number") return 1;
  return first.localeCompare(second, undefined, { numeric: true });
}

function sortable(table, announce) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    if (!heading.textContent.trim() || heading.classList.contains("picture")) return;
    const button = made("button", { type: "button", textContent: heading.textContent });
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const before = heading.getAttribute("aria-sort"); // figures begin with the largest
      const rising = before ? before === "descending" : !heading.classList.contains("figure");
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row.cells[column]), row]);
      rows.sort(([a], [b]) => {
        const missing = (a === "–") - (b === "–"); // last in either order
        return missing || (rising ? compare(a, b) : compare(b, a));
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
      announce(`Sorted by ${button.textContent}, ${rising ? "ascending" : "descending"}`);
    });
  });
}

function filterable(table, announce) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length <= FEW) return;
  const tools = made("div", { className: "tools" });
  table.before(tools);
  const texts = new Map(rows.map((row) => [row, [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase()]));
  const label = made("label", {}, tools);
  label.append("Filter ");
  const input = made("input", { type: "search", placeholder: "words of a row" }, label);
  const count = made("span", { textContent: `${rows.length} rows` }, tools);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [row, text] of texts) {
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = words.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
    announce(count.textContent);
  });
}

function csvOf(table) {
  const columns = [...table.tHead.rows[0].cells].map((cell, at) => [cell, at]).filter(([cell]) => !cell.classList.contains("picture"));
  const field = (value) => {
    const text = typeof value === "string" && FORMULA.test(value) && !(value.trim() && isFinite(value)) ? `'${value}` : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const missing = (value) => (value === "–" ? "" : value);
  const lines = [columns.map(([cell]) => field(cell.textContent.trim()))];
  for (const row of table.tBodies[0].rows) {
    if (!row.hidden) lines.push(columns.map(([, at]) => field(missing(valueOf(row.cells[at])))));
  }
  return lines.map((line) => line.join(",")).join("\n") + "\n";
}

function exportable(table) {
  const button = made("button", { type: "button", className: "save", textContent: "Save as CSV" });
  table.after(button);
  button.setAttribute("aria-label", `Save as CSV: ${table.caption.textContent.trim()}`);
  button.addEventListener("click", () => {
    const address = URL.createObjectURL(new Blob(["\ufeff", csvOf(table)], { type: "text/csv" }));
    made("a", { href: address, download: `${table.dataset.name}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  });
}

// A table whose display is changed on a narrow screen keeps its meaning only by explicit roles.
function keepRoles(table) {
  table.setAttribute("role", "table");
  for (const part of [table.tHead, ...table.tBodies]) part.setAttribute("role", "rowgroup");
  for (const row of table.rows) {
    row.setAttribute("role", "row");
    for (const cell of row.cells) {
      const heading = cell.scope === "col" ? "columnheader" : "rowheader";
      cell.setAttribute("role", cell.tagName === "TH" ? heading : "cell");
    }
  }
}

function enlargeable(images) {
  const dialog = made("dialog", {}, document.body);
  dialog.setAttribute("aria-label", "Enlarged picture");
  const large = made("img", { alt: "" }, dialog);
  const caption = made("p", {}, dialog);
  const close = made("button", { type: "button", textContent: "Close" }, dialog);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  for (const image of images) {
    const button = made("button", { type: "button", className: "enlarge", title: "Enlarge" });
    image.replaceWith(button);
    button.append(image);
    button.addEventListener("click", () => {
      large.src = image.src;
      large.className = image.className;
      large.alt = image.alt;
      caption.textContent = image.alt;
      dialog.showModal();
    });
  }
}

async function copied(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(code); // where the clipboard is closed to pages
    return document.execCommand("copy");
  }
}

function copyable(code, announce) {
  const button = made("button", { type: "button", textContent: "Copy" });
  button.setAttribute("aria-label", `Copy: ${code.textContent}`);
  code.after(button);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(code)) ? "Copied" : "Press Ctrl+C";
    announce(button.textContent);
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}

const status_ = made("p", { className: "status" });
status_.setAttribute("role", "status");
document.querySelector("footer").append(status_);
const announce = (text) => (status_.textContent = text);
for (const table of document.querySelectorAll("table[data-name]")) {
  sortable(table, announce);
  filterable(table, announce);
  exportable(table);
  if (table.classList.contains("stack")) keepRoles(table);
}
enlargeable([...document.querySelectorAll(".tile img, td.picture img")]);
for (const code of document.querySelectorAll(".command code")) copyable(code, announce);
