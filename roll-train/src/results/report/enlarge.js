// A click on a video or a picture enlarges it; the arrow keys go to its neighbours in the row.
const large = document.querySelector('dialog.large');
const enlarged = large.querySelector('video'), picture = large.querySelector('img');
let of = null;
const enlarge = video => {
  of = video;
  large.querySelector('.name').textContent = video.getAttribute('aria-label');
  const isPicture = video.nodeName === 'IMG';
  [picture.hidden, enlarged.hidden] = [!isPicture, isPicture];
  if (isPicture) picture.src = video.src; else enlarged.src = video.src;
  if (!large.open) large.showModal();
};
const beside = way => {
  const row = [...of.closest('.row')?.querySelectorAll('video, img.clip') ?? []];
  const next = row[row.indexOf(of) + way];
  if (next) enlarge(next);
};
// With controls a click starts and stops the video.
const isLink = video => video?.matches?.('.row video, .row img.clip') && !video.controls;
document.addEventListener('click', event => {
  if (isLink(event.target)) enlarge(event.target);
  else if (event.target.closest('[data-way]')) beside(+event.target.closest('[data-way]').dataset.way);
  else if (event.target === large || event.target.closest('.close')) large.close();
});
document.addEventListener('keydown', event => {
  if (event.key === 'Enter' && isLink(event.target)) enlarge(event.target);
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (large.open && way) beside(way);
});
large.addEventListener('close', () => { enlarged.removeAttribute('src'); enlarged.load(); picture.removeAttribute('src'); of?.focus(); });
