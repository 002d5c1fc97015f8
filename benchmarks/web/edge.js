// edge, by the package of a site that `edge export --device web` wrote.

/** settings: site (address of the folder), threads, isa (of a module; default: the best here), engine (cpu or gpu). */
export async function open({ site, threads, isa, engine = "cpu" }) {
  const folder = new URL(site, location.href);
  const { Edge } = await import(new URL("edge/index.js", folder).href);
  const session = await Edge.open(folder, { threads, isa, engine });
  if (session.info.threads !== threads) throw new Error(`edge has ${session.info.threads} threads`);
  return {
    version: session.info.isa,
    async run({ text }, tokens, onPiece) {
      await session.rewind();
      let written = "";
      const options = { role: "raw", temperature: 0, maxTokens: tokens, ignoreEos: true };
      for await (const piece of session.stream(text, options)) {
        onPiece();
        written += piece;
      }
      return { text: written, tokens: session.report.tokens, report: session.report };
    },
    close: () => session.close(),
  };
}
