//! Positions of the fixtures' tokens. The numbers of the network are compared in `tests/parity`, on every backend.

use roll_core::{Positions, VisionLanguageModel};

use super::fixture::Fixture;
use crate::positions;

#[test]
fn positions_are_those_of_transformers() {
    for fixture in Fixture::all() {
        let model = fixture.open("flex", "f32");
        for case in fixture.cases() {
            let expected = &fixture.outputs[&format!("{case}.position_ids")];
            let (ids, shape) = (expected.as_slice::<i64>().unwrap(), expected.shape());
            let (rows, columns) = (shape[1], shape[2]);
            for text in fixture.texts(&case, &model) {
                let placed = positions::place(model.facts(), &text.tokens, &text.media).unwrap();
                let found = positions::positions(model.config(), text.tokens.len(), &placed, Positions::Multimodal);
                for (token, place) in found.iter().enumerate() {
                    for axis in 0..3 {
                        let at = (axis * rows + text.row) * columns + text.padding + token;
                        assert_eq!(
                            place[axis] as i64, ids[at],
                            "{case}: axis {axis} of token {token}, row {}",
                            text.row
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn features_of_several_media_are_those_of_each() {
    for fixture in Fixture::all() {
        let model = fixture.open("flex", "f32");
        for case in fixture.cases() {
            for text in fixture.texts(&case, &model) {
                let one_by_one =
                    |medium| model.features(std::slice::from_ref(medium)).unwrap().f32s().unwrap().to_vec();
                let alone: Vec<f32> = text.media.iter().flat_map(one_by_one).collect();
                let together = model.features(&text.media).unwrap();
                let differences = together.f32s().unwrap().iter().zip(&alone).map(|(a, b)| (a - b).abs());
                assert!(differences.fold(0.0, f32::max) < 1e-4, "{case}");
            }
        }
    }
}
