//! Questions that are made here: sums of whole numbers.

use roll_core::Noise;
use serde_json::{Map, Value, json};

use super::rows::Row;

/// Most questions. Where there are more sums of a kind, these are drawn.
const MOST: usize = 20_000;

/// All sums of `operands` numbers of `digits` digits, or [`MOST`] of them, in an order that looks random and is always
/// the same. Sums of the same numbers in another order have the same [`Row::split_key`].
pub fn rows(digits: u32, operands: usize) -> Vec<Row> {
    let first = if digits == 1 { 0 } else { 10u64.pow(digits - 1) };
    let count = 10u64.pow(digits) - first;
    let all = count.checked_pow(operands as u32).and_then(|all| usize::try_from(all).ok()).filter(|all| *all <= MOST);
    let noise = Noise::new(u64::from(digits) * 100 + operands as u64);
    let numbers: Vec<Vec<u64>> = match all {
        Some(all) => {
            let number = |index: usize, place: u32| first + (index as u64 / count.pow(place)) % count;
            let sum = |index: usize| (0..operands as u32).map(|place| number(index, place)).collect();
            noise.permutation(0, all).into_iter().map(sum).collect()
        }
        None => drawn(&noise, first, count, operands),
    };
    numbers.into_iter().map(row).collect()
}

/// Draws [`MOST`] different sums.
fn drawn(noise: &Noise, first: u64, count: u64, operands: usize) -> Vec<Vec<u64>> {
    let mut rng = noise.generator(roll_core::Purpose::Environments, 0, 0);
    let mut seen = std::collections::HashSet::new();
    let mut sums = Vec::with_capacity(MOST);
    while sums.len() < MOST {
        let sum: Vec<u64> =
            (0..operands).map(|_| first + crate::environments::below(&mut rng, count as usize) as u64).collect();
        if seen.insert(sum.clone()) {
            sums.push(sum);
        }
    }
    sums
}

fn row(numbers: Vec<u64>) -> Row {
    let joined = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" + ");
    let question = format!("What is {}?", joined(&numbers));
    let answer = json!(numbers.iter().sum::<u64>());
    let mut sorted = numbers;
    sorted.sort_unstable();
    let fields = [("question", json!(question)), ("answer", answer.clone())];
    let fields: Map<String, Value> = fields.into_iter().map(|(key, value)| (key.to_string(), value)).collect();
    let origin = format!("`{question}`");
    Row { origin, system: String::new(), question, images: Vec::new(), answer, fields, split_key: joined(&sorted) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_sum_is_there_once() {
        let sums = rows(2, 2);
        let questions: HashSet<&str> = sums.iter().map(|row| row.question.as_str()).collect();
        assert_eq!((sums.len(), questions.len()), (8100, 8100));
        assert!(questions.contains("What is 30 + 10?") && questions.contains("What is 99 + 99?"));
        assert!(!questions.contains("What is 9 + 10?"));
        for row in &sums {
            let numbers: Vec<u64> =
                row.question.split_whitespace().filter_map(|word| word.trim_end_matches('?').parse().ok()).collect();
            assert_eq!(row.answer, json!(numbers[0] + numbers[1]));
        }
        assert_eq!(rows(1, 2).len(), 100);
    }

    #[test]
    fn more_sums_than_are_wanted_are_drawn_once_each() {
        for (digits, operands) in [(4, 2), (6, 8), (9, 2)] {
            let sums = rows(digits, operands);
            let questions: HashSet<&str> = sums.iter().map(|row| row.question.as_str()).collect();
            assert_eq!(questions.len(), MOST);
            assert_eq!(sums[7].question, rows(digits, operands)[7].question);
        }
    }
}
