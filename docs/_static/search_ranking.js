// Ranking of search results: guides first, design notes last. The other numbers are the defaults of Sphinx.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (kind === "object") return score >= 11 ? score + 20 : score; // 11: the query is the name
    if (/^(tutorial|index|concepts|how-to\/|coming-from\/|notebooks\/)/.test(docname)) return score + 20;
    if (/^design\//.test(docname)) return score - 30;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
