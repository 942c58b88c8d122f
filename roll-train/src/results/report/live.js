// The page of runs that go on: its parts are replaced where a newer page differs.
const token = new URLSearchParams(location.search).get('token');
const get = async path => {
  const answer = await fetch(`${path}?token=${token}`);
  if (!answer.ok) throw new Error(answer.status);
  return answer.text();
};
// Sections and rows are known by their titles, figures by their titles or the video in them.
const key = node => {
  const kind = node.video?.nodeName ?? node.nodeName;
  if (/^(H2|TR)$/.test(kind)) return [kind, node.id, (node.firstElementChild ?? node).textContent].join();
  const part = kind === 'FIGURE' ? node.querySelector('video, img, .failed') ?? node : node;
  const of = (part.video ?? part).getAttribute?.('src') ?? node.getAttribute?.('aria-label');
  return [kind, node.id, kind === 'FIGURE' || kind === 'VIDEO' ? of : ''].join();
};
const merge = (old, fresh) => {
  // A video goes on playing, and a note that it cannot be played stays.
  if (/^(VIDEO|DIALOG)$/.test(old.nodeName) || old.video || old.isEqualNode(fresh)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) { old.nodeValue = fresh.nodeValue; return; }
  for (const name of new Set([...old.getAttributeNames(), ...fresh.getAttributeNames()])) {
    if (old.nodeName === 'DETAILS' && name === 'open') continue;
    if (old.getAttribute(name) === fresh.getAttribute(name)) continue;
    fresh.hasAttribute(name) ? old.setAttribute(name, fresh.getAttribute(name)) : old.removeAttribute(name);
  }
  // The script has drawn the parts of a plot.
  if (plots.has(old)) { draw(old); return; }
  let next = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    let same = next;
    // The parts of a section are not taken from the section after it, and spaces from nowhere else.
    while (same && key(same) !== key(node)) {
      const last = node.nodeName === '#text' || (same.nodeName === 'H2' && node.nodeName !== 'H2');
      same = last ? null : same.nextSibling;
    }
    if (!same) { old.insertBefore(node, next); continue; }
    while (next !== same) { const gone = next; next = next.nextSibling; gone.remove(); }
    next = same.nextSibling;
    merge(same, node);
  }
  while (next) { const gone = next; next = next.nextSibling; gone.remove(); }
};
const update = async () => {
  if (await get('/version') === document.body.dataset.version) return;
  const page = new DOMParser().parseFromString(await get('/'), 'text/html');
  document.title = page.title;
  merge(document.body, page.body);
  addAll([...document.querySelectorAll('video:not(.large video)')].filter(video => !videos.includes(video)));
  addPlots();
};
const watch = async () => {
  const cut = await update().then(() => false, () => true);
  document.body.classList.toggle('cut', cut);
  setTimeout(watch, 2000);
};
watch();
document.addEventListener('click', async event => {
  const { run } = event.target.dataset;
  if (run === undefined) return;
  event.target.disabled = true;
  const request = { method: 'POST', headers: { 'X-Roll-Token': token }, referrerPolicy: 'same-origin' };
  const answer = await fetch(`/stop?run=${run}`, request).catch(error => new Response(error.message));
  event.target.parentNode.append(await answer.text());
  update().catch(() => {});
});
