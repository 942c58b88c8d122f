// The page on which people vote: it shows the oldest open question, and after each vote the next one.
const token = new URLSearchParams(location.search).get('token');
const find = selector => document.querySelector(selector);
const write = (selector, text) => { find(selector).textContent = text; };
let question = null, since = 0, busy = false;
const choice = (clip, i) => {
  const figure = document.createElement('figure'), video = document.createElement('video');
  const button = find('.equal button').cloneNode();
  const bytes = Uint8Array.from(atob(clip), c => c.charCodeAt(0));
  video.src = URL.createObjectURL(new Blob([bytes], { type: 'video/mp4' }));
  Object.assign(video, { muted: true, loop: true, autoplay: true, playsInline: true, ariaLabel: `clip ${i + 1}` });
  button.dataset.choice = i + 1;
  button.textContent = i + 1;
  figure.append(video, button);
  return figure;
};
const show = shown => {
  question = shown;
  since = performance.now();
  document.body.classList.toggle('idle', !shown);
  write('h1', shown ? shown.question : 'Nothing to vote on');
  write('.prompt', shown ? shown.prompt : 'The next question of the run appears here.');
  videos.forEach(video => URL.revokeObjectURL(video.src));
  videos.length = loaded = failed = 0;
  begun = false;
  find('.choices').replaceChildren(...(shown?.clips ?? []).map(choice));
  find('.choices').style.setProperty('--clips', shown?.clips.length ?? 1);
  addAll([...document.querySelectorAll('video')]);
};
const load = async () => {
  try {
    const answer = await fetch(`/question?token=${token}`);
    if (!answer.ok) throw new Error(await answer.text());
    const next = await answer.json();
    write('.under', `${next.given} ${next.given === 1 ? 'vote' : 'votes'} given, ${next.open} open`);
    write('.note', '');
    if (!next.question || next.question.id !== question?.id) show(next.question);
  } catch (error) {
    write('.note', `No answer of roll watch: ${error.message}`);
    show(null);
  }
  if (!question) setTimeout(load, 500);
};
const vote = async chosen => {
  // A second tap on the same place was not meant for the next clips.
  if (!question || busy || performance.now() - since < 300) return;
  busy = true;
  const request = { method: 'POST', headers: { 'X-Roll-Token': token }, referrerPolicy: 'same-origin' };
  const path = `/vote?run=${question.run}&id=${question.id}&choice=${chosen}`;
  const answer = await fetch(path, request).catch(error => new Response(error.message, { status: 503 }));
  busy = false;
  // 409: somebody else voted on this question.
  if (answer.ok || answer.status === 409) await load();
  else write('.note', `The vote is not stored: ${await answer.text()}`);
};
document.addEventListener('click', event => {
  const chosen = event.target.closest('button')?.dataset.choice;
  if (chosen !== undefined) vote(chosen);
});
document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
  if (/^[0-9]$/.test(event.key) && event.key <= (question?.clips.length ?? -1)) vote(event.key);
});
load();
