// What a reader would see of the page, measured by the browser: every text with its colours, size and box, and every drawing.
() => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;

  const box = (rect) => ({ left: rect.left, right: rect.right, width: rect.width, height: rect.height });

  // What lies behind an element, innermost first, and how much of it shines through; asked once an element.
  const known = new Map();
  const around = (element) => {
    if (!element) return { opacity: 1, backgrounds: [] };
    if (!known.has(element)) {
      const style = getComputedStyle(element);
      const outer = around(element.parentElement);
      known.set(element, {
        opacity: Number(style.opacity) * outer.opacity,
        backgrounds: [style.backgroundColor, ...outer.backgrounds],
      });
    }
    return known.get(element);
  };

  const describe = (node) => {
    const element = node.parentElement;
    const style = getComputedStyle(element);
    const range = document.createRange();
    range.selectNodeContents(node);
    const drawing = element.ownerSVGElement;
    const scale = drawing ? Math.abs(element.getScreenCTM().d) : 1;
    return {
      text: node.textContent.trim(),
      tag: element.tagName.toLowerCase(),
      chart: Boolean(drawing),
      color: drawing ? style.fill : style.color,
      ...around(element),
      size_px: parseFloat(style.fontSize) * scale,
      weight: Number(style.fontWeight),
      box: box(range.getBoundingClientRect()),
    };
  };

  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.textContent.trim() && node.parentElement.checkVisibility()) texts.push(describe(node));
  }
  return {
    texts,
    drawings: [...document.querySelectorAll("svg")].map((one) => box(one.getBoundingClientRect())),
    canvas: getComputedStyle(document.body).backgroundColor,
    scroll_width: document.scrollingElement.scrollWidth,
    inner_width: window.innerWidth,
  };
}
