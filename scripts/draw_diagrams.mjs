// Draws every ```mermaid block of docs/ for the site, which shows them without a script and without the network:
//
//     npm install --no-save --no-package-lock beautiful-mermaid@1.1.3 && node scripts/draw_diagrams.mjs
//
// A drawing is docs/diagrams/DIGEST.svg, by the SHA-256 of its block; those of blocks that are gone are removed.
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { renderMermaidSVG } from "beautiful-mermaid";

const docs = new URL("../docs/", import.meta.url);
const drawings = new URL("diagrams/", docs);
// The colours are the theme's, so that a drawing is dark where the page is.
const look = {
  bg: "var(--md-default-bg-color)",
  fg: "var(--md-default-fg-color)",
  muted: "var(--md-default-fg-color--light)",
  transparent: true,
  padding: 8,
  nodeSpacing: 16,
  layerSpacing: 24,
};

rmSync(drawings, { recursive: true, force: true });
mkdirSync(drawings);
for (const page of readdirSync(docs, { recursive: true }).filter((name) => name.endsWith(".md"))) {
  for (const [, source] of readFileSync(new URL(page, docs), "utf8").matchAll(/^```mermaid\n(.*?)\n```$/gms)) {
    const svg = renderMermaidSVG(source, look)
      .replace(/^\s*@import.*\n/m, "") // a font from elsewhere
      .replace("auto-start-reverse", "auto"); // its first arrowhead points backwards already
    const digest = createHash("sha256").update(source).digest("hex").slice(0, 12);
    writeFileSync(new URL(`${digest}.svg`, drawings), svg + "\n");
    console.log(`docs/diagrams/${digest}.svg: ${page}`);
  }
}
