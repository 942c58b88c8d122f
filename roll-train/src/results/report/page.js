// Videos of a row belong together: all begin at once, and one that cannot be played says so.
const videos = [];
// Readers who asked for less motion start a video themselves.
const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
let loaded = 0, failed = 0, begun = false;
const tell = () => {
  document.body.dataset.videos = `${loaded} loaded, ${failed} failed of ${videos.length}`;
  if (begun || loaded + failed < videos.length) return;
  begun = true;
  videos.forEach(v => { v.currentTime = 0; if (!still) v.play && v.play().catch(() => {}); });
};
const add = video => {
  const done = ok => {
    ok ? loaded++ : failed++;
    // A video that joins a row which plays already.
    if (begun && ok) video.currentTime = video.closest('.row')?.querySelector('video').currentTime ?? 0;
    tell();
  };
  const fail = () => {
    const note = document.createElement('div');
    note.className = 'failed';
    note.textContent = video.src.startsWith('data:') ? 'This browser cannot play H.264.'
      : 'This video is gone, or this browser cannot play H.264.';
    note.video = video;
    video.replaceWith(note);
    done(false);
  };
  if (still) { video.autoplay = false; video.controls = true; video.pause(); }
  if (video.error) fail();
  else if (video.readyState >= 2) done(true);
  else { video.addEventListener('loadeddata', () => done(true), { once: true }); video.addEventListener('error', fail, { once: true }); }
};
const addAll = added => { videos.push(...added); added.forEach(add); tell(); };
addAll([...document.querySelectorAll('video:not(.large video)')]);
