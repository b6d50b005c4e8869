// SPDX-License-Identifier: Apache-2.0
// Elements are made by function, text goes in as text nodes: nothing here parses HTML, so names cannot inject any.

export type Child = Node | string | number | null | undefined | false | readonly Child[];
type Props = Record<string, string | number | boolean | null | undefined | ((event: never) => void)>;

const SVG = "http://www.w3.org/2000/svg";

function fill(node: Element, props: Props, children: readonly Child[]): void {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(key.slice(2), value as EventListener);
    else node.setAttribute(key === "class_" ? "class" : key, value === true ? "" : String(value));
  }
  append(node, children);
}

function append(node: Node, children: readonly Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child as readonly Child[]);
    else node.appendChild(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  fill(node, props, children);
  return node;
}

export function svg(tag: string, props: Props = {}, ...children: Child[]): SVGElement {
  const node = document.createElementNS(SVG, tag) as SVGElement;
  fill(node, props, children);
  return node;
}

export function replace(node: Element, ...children: Child[]): void {
  node.textContent = "";
  append(node, children);
}

export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Plain http on another host has no clipboard interface: select and copy the old way.
    const area = h("textarea", { class: "offscreen", readonly: true }, text);
    document.body.appendChild(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
