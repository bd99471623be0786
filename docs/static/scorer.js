// Pages for users come before those for contributors, and both before pages that are made of files.
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    page.startsWith("files/") ? score / 8 : page.startsWith("contributing/") ? score / 4 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
