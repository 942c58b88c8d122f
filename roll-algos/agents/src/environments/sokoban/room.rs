//! Rooms: their rules, and the generation of levels by playing backwards from the solved state.

use std::collections::{BTreeSet, HashSet, VecDeque};

use rand_chacha::ChaCha8Rng;
use roll_core::{Noise, Purpose};

use crate::environments::{below, uniform};

/// Number of attempts to generate a level.
const TRIES: u64 = 100;

/// Row and column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub usize, pub usize);

/// A step (down, right).
pub type Step = (isize, isize);

const STEPS: [Step; 4] = [(-1, 0), (1, 0), (0, -1), (0, 1)];

impl Position {
    /// The neighbouring position. A room is surrounded by walls, so no step from inside leaves it.
    fn next(self, (down, right): Step) -> Self {
        Self(self.0.saturating_add_signed(down), self.1.saturating_add_signed(right))
    }

    fn distance(self, other: Self) -> usize {
        self.0.abs_diff(other.0) + self.1.abs_diff(other.1)
    }
}

/// A room with boxes and a player.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    floor: BTreeSet<Position>,
    targets: Vec<Position>,
    /// Box i was pulled from target i when the level was generated.
    boxes: Vec<Position>,
    player: Position,
}

impl Room {
    /// The kind of a cell: wall 0, floor 1, target 2, box on target 3, box 4, player 5, player on target 6.
    pub fn kind(&self, at: Position) -> u8 {
        let (is_target, has_box) = (self.targets.contains(&at), self.boxes.contains(&at));
        // Floor, target, box, player.
        match (self.floor.contains(&at), is_target, has_box, at == self.player) {
            (false, ..) => 0,
            (_, true, _, true) => 6,
            (_, false, _, true) => 5,
            (_, true, true, _) => 3,
            (_, false, true, _) => 4,
            (_, true, false, _) => 2,
            (_, false, false, _) => 1,
        }
    }

    /// Moves the player and pushes a box in its way. Nothing moves if a wall is in the way, or if a wall or another box
    /// is behind the box.
    pub fn push(&mut self, step: Step) {
        let next = self.player.next(step);
        if !self.floor.contains(&next) {
            return;
        }
        if let Some(i) = self.boxes.iter().position(|b| *b == next) {
            let behind = next.next(step);
            if !self.floor.contains(&behind) || self.boxes.contains(&behind) {
                return;
            }
            self.boxes[i] = behind;
        }
        self.player = next;
    }

    /// Number of boxes on targets.
    pub fn boxes_on_targets(&self) -> usize {
        self.boxes.iter().filter(|b| self.targets.contains(b)).count()
    }

    /// Whether all boxes are on targets.
    pub fn solved(&self) -> bool {
        self.boxes_on_targets() == self.boxes.len()
    }

    /// Generates a level of `size` (rows, columns) with `boxes` boxes. A random walk of `carving` steps creates the
    /// floor. A search over `depth` states then plays backwards from the solved state, pulling boxes, to the state
    /// whose boxes are farthest from their targets. Every pull reverses a push, so the level can be solved. `None` if
    /// all attempts fail.
    pub fn generate(size: [usize; 2], boxes: usize, carving: usize, depth: usize, seed: u64) -> Option<Self> {
        (0..TRIES).find_map(|attempt| {
            let mut rng = Noise::new(seed).generator(Purpose::Environments, 2, attempt);
            let floor = carve(size, carving, &mut rng);
            if floor.len() < boxes + 2 {
                return None;
            }
            let mut cells: Vec<Position> = floor.iter().copied().collect();
            shuffle(&mut cells, &mut rng);
            let targets = cells[..boxes].to_vec();
            let solved = Self { floor, boxes: targets.clone(), targets, player: cells[boxes] };
            let mut room = solved.farthest(depth, &mut rng)?;
            room.wander(&mut rng);
            Some(room)
        })
    }

    /// Returns the state whose boxes are farthest from their targets, out of `depth` states that backward play reaches.
    fn farthest(&self, depth: usize, rng: &mut ChaCha8Rng) -> Option<Self> {
        let mut seen = HashSet::new();
        let mut unexplored = VecDeque::from([self.clone()]);
        // The greatest sum of distances so far, and its state.
        let mut best: Option<(usize, Self)> = None;
        while let Some(room) = unexplored.pop_front() {
            if seen.len() >= depth || !seen.insert((room.player, room.boxes.clone())) {
                continue;
            }
            let distance: usize = room.boxes.iter().zip(&room.targets).map(|(b, t)| b.distance(*t)).sum();
            if !room.solved() && best.as_ref().is_none_or(|(greatest, _)| distance > *greatest) {
                best = Some((distance, room.clone()));
            }
            let mut steps = STEPS;
            shuffle(&mut steps, rng);
            for step in steps {
                let Some(walked) = room.walked(step) else { continue };
                // The box behind the player may be pulled along.
                let behind = room.player.next((-step.0, -step.1));
                let pulled = room.boxes.iter().position(|b| *b == behind).map(|i| {
                    let mut pulled = walked.clone();
                    pulled.boxes[i] = room.player;
                    pulled
                });
                // Depth-first along pulls and breadth-first along walks, so that boxes move far within few states.
                if let Some(pulled) = pulled {
                    unexplored.push_front(pulled);
                }
                unexplored.push_back(walked);
            }
        }
        best.map(|(_, room)| room)
    }

    /// The state after a step of the player onto free floor; `None` if a wall or a box is there.
    fn walked(&self, step: Step) -> Option<Self> {
        let next = self.player.next(step);
        let free = self.floor.contains(&next) && !self.boxes.contains(&next);
        free.then(|| Self { player: next, ..self.clone() })
    }

    /// Makes a few steps without pulling, so that the player is not always next to a box.
    fn wander(&mut self, rng: &mut ChaCha8Rng) {
        for _ in 0..below(rng, 4) {
            if let Some(walked) = self.walked(STEPS[below(rng, STEPS.len())]) {
                *self = walked;
            }
        }
    }

    /// A shortest solution.
    #[cfg(test)]
    pub fn solution(&self) -> Option<Vec<Step>> {
        let mut seen = HashSet::new();
        let mut open = VecDeque::from([(self.clone(), Vec::new())]);
        while let Some((room, path)) = open.pop_front() {
            if room.solved() {
                return Some(path);
            }
            for step in STEPS {
                let mut next = room.clone();
                next.push(step);
                if seen.insert((next.player, next.boxes.clone())) {
                    open.push_back((next, [path.clone(), vec![step]].concat()));
                }
            }
        }
        None
    }

    /// Parses a room from its text in the default symbols.
    #[cfg(test)]
    pub fn parse(rows: &[&str]) -> Self {
        let cells: Vec<(Position, char)> = rows
            .iter()
            .enumerate()
            .flat_map(|(r, row)| row.chars().enumerate().map(move |(c, symbol)| (Position(r, c), symbol)))
            .collect();
        let of = |symbols: &str| cells.iter().filter(|(_, s)| symbols.contains(*s)).map(|(at, _)| *at).collect();
        let (targets, boxes, players): (Vec<_>, Vec<_>, Vec<Position>) = (of("O√S"), of("X√"), of("PS"));
        let floor = cells.iter().filter(|(_, s)| *s != '#').map(|(at, _)| *at).collect();
        Self { floor, targets, boxes, player: players[0] }
    }
}

/// Carves a floor along a random walk, each step widened by a small shape. The outermost cells remain walls.
fn carve([rows, columns]: [usize; 2], steps: usize, rng: &mut ChaCha8Rng) -> BTreeSet<Position> {
    /// Probability that a step turns, as in gym-sokoban.
    const CHANGE: f64 = 0.35;
    /// The cells that a step carves, relative to the position of the walk.
    const SHAPES: [&[Step]; 5] = [
        &[(0, -1), (0, 0), (0, 1)],
        &[(-1, 0), (0, 0), (1, 0)],
        &[(0, -1), (0, 0), (1, 0)],
        &[(0, -1), (0, 0), (1, -1), (1, 0)],
        &[(0, 0), (0, 1), (1, 0)],
    ];
    let clamped = |p: Position| Position(p.0.clamp(1, rows - 2), p.1.clamp(1, columns - 2));
    let mut at = Position(1 + below(rng, rows - 2), 1 + below(rng, columns - 2));
    let mut direction = STEPS[below(rng, STEPS.len())];
    let mut floor = BTreeSet::new();
    for _ in 0..steps {
        if uniform(rng) < CHANGE {
            direction = STEPS[below(rng, STEPS.len())];
        }
        at = clamped(at.next(direction));
        let shape = SHAPES[below(rng, SHAPES.len())];
        floor.extend(shape.iter().map(|step| at.next(*step)).filter(|p| clamped(*p) == *p));
    }
    floor
}

fn shuffle<T>(items: &mut [T], rng: &mut ChaCha8Rng) {
    for i in (1..items.len()).rev() {
        items.swap(i, below(rng, i + 1));
    }
}
