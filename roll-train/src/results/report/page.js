// Videos of a row belong together: all begin at once, and one that cannot be played says so.
const videos = [...document.querySelectorAll('video')];
// Readers who asked for less motion start a video themselves.
const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
if (still) videos.forEach(video => { video.autoplay = false; video.controls = true; video.pause(); });
let loaded = 0, failed = 0;
const tell = () => {
  document.body.dataset.videos = `${loaded} loaded, ${failed} failed of ${videos.length}`;
  if (loaded + failed === videos.length) videos.forEach(v => { v.currentTime = 0; if (!still) v.play && v.play().catch(() => {}); });
};
for (const video of videos) {
  const done = ok => { ok ? loaded++ : failed++; tell(); };
  const fail = () => {
    const note = document.createElement('div');
    note.className = 'failed';
    note.textContent = 'This browser cannot play H.264.';
    video.replaceWith(note);
    done(false);
  };
  if (video.error) fail();
  else if (video.readyState >= 2) done(true);
  else { video.addEventListener('loadeddata', () => done(true), { once: true }); video.addEventListener('error', fail, { once: true }); }
}
tell();
