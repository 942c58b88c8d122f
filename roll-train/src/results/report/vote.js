// The page on which people vote: it shows the oldest open question, and after each vote the next one.
const token = new URLSearchParams(location.search).get('token');
const find = selector => document.querySelector(selector);
const write = (selector, text) => { find(selector).textContent = text; };
// A vote is sent with the next one, or after this time in ms: until then it can be taken back.
let hold = 2500;
// The question on the page, the vote that is not sent yet, and the questions with votes that were.
let question = null, since = 0, held = null, busy = false;
const sent = new Set();
find('.report').href = `/?token=${token}`;
const player = (run, clip, ariaLabel) => {
  const video = document.createElement('video');
  video.src = `/video?run=${run}&id=${clip}&token=${token}`;
  return Object.assign(video, { muted: true, loop: true, autoplay: true, playsInline: true, ariaLabel });
};
const choice = (run, clip, i) => {
  const figure = document.createElement('figure'), video = player(run, clip, `clip ${i + 1}`);
  const button = find('.equal button').cloneNode();
  video.dataset.choice = i + 1;
  button.dataset.choice = i + 1;
  button.textContent = i + 1;
  figure.append(video, button);
  return figure;
};
const show = (shown, ended) => {
  question = shown;
  since = performance.now();
  document.body.classList.toggle('idle', !shown);
  const idle = ended ? ['The run has ended', 'There is nothing more to vote on.']
    : ['Nothing to vote on', 'The next question of the run appears here.'];
  write('h1', shown ? shown.question : idle[0]);
  write('.prompt', shown ? shown.prompt : idle[1]);
  // A video that is not shown any more loads nothing.
  videos.forEach(video => { video.removeAttribute('src'); video.load(); });
  videos.length = loaded = failed = 0;
  begun = false;
  find('.choices').replaceChildren(...(shown?.clips ?? []).map((clip, i) => choice(shown.run, clip, i)));
  const picture = shown?.reference ? [player(shown.run, shown.reference, 'reference'), 'reference'] : [];
  find('.reference').hidden = !picture.length;
  find('.reference').replaceChildren(...picture);
  const count = shown?.clips.length ?? 1, { classList, style } = find('.choices');
  // On a phone more than two clips lie in two columns.
  classList.toggle('two', count === 2);
  classList.toggle('many', count > 2);
  style.setProperty('--lines', count > 2 ? Math.ceil(count / 2) : count);
  addAll([...document.querySelectorAll('video')]);
};
const load = async () => {
  try {
    const answer = await fetch(`/question?token=${token}`);
    if (!answer.ok) throw new Error(await answer.text());
    const { given, open, coming, ended, questions } = await answer.json();
    const waiting = held ? 1 : 0, more = coming ? `, about ${coming} more to come in this run` : '';
    write('.under', `${given + waiting} ${given + waiting === 1 ? 'vote' : 'votes'} given, ${open - waiting} open${more}`);
    write('.note', '');
    const next = questions.find(({ id }) => id !== held?.question.id && !sent.has(id)) ?? null;
    if (!next || next.id !== question?.id) show(next, ended);
  } catch (error) {
    write('.note', `No answer of roll watch: ${error.message}`);
    show(null);
  }
};
const keepLooking = async () => {
  if (!question) await load();
  setTimeout(keepLooking, 500);
};
// Sends the vote that is held.
const send = async () => {
  if (!held || busy) return;
  const { question: voted, chosen, timer } = held;
  clearTimeout(timer);
  held = null;
  busy = true;
  find('.back button').hidden = true;
  sent.add(voted.id);
  const request = { method: 'POST', headers: { 'X-Roll-Token': token }, referrerPolicy: 'same-origin', keepalive: true };
  const path = `/vote?run=${voted.run}&id=${voted.id}&choice=${chosen}`;
  const answer = await fetch(path, request).catch(error => new Response(error.message, { status: 503 }));
  busy = false;
  // 409: somebody else voted on this question.
  if (answer.ok || answer.status === 409) return;
  sent.delete(voted.id);
  show(voted);
  write('.note', `The vote is not stored: ${await answer.text()}`);
};
const vote = async chosen => {
  // A second tap on the same place was not meant for the next clips.
  if (!question || busy || performance.now() - since < 300) return;
  const voted = question;
  question = null;
  await send();
  held = { question: voted, chosen, timer: setTimeout(() => send().then(load), hold) };
  find('.back button').hidden = false;
  await load();
};
const takeBack = () => {
  if (!held) return;
  clearTimeout(held.timer);
  const { question: voted } = held;
  held = null;
  find('.back button').hidden = true;
  show(voted);
};
document.addEventListener('click', event => {
  if (event.target.closest('.back button')) takeBack();
  const chosen = event.target.closest('[data-choice]')?.dataset.choice;
  if (chosen !== undefined && !event.target.controls) vote(chosen);
});
document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
  if (event.key === 'Backspace') takeBack();
  if (/^[0-9]$/.test(event.key) && event.key <= (question?.clips.length ?? -1)) vote(event.key);
});
// A reader who leaves has decided.
addEventListener('pagehide', send);
keepLooking();
