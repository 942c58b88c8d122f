//! Tests of decode attention over prompt and tail, compared with the same formula in f64.

use burn::tensor::{DType, Tensor};

use super::{Exact, assert_near, devices, download, noise};
use crate::ops::{CachedSequence, DecodeCall, attend_rows, decode, store_rows};

/// Covers a prompt with a tail, a tail with a masked beginning, prompts of different lengths, and a prompt without a
/// tail.
#[test]
fn decode_attention_matches_f64() {
    let place = |prompt, slot, tail, skip| CachedSequence { prompt, slot, tail, skip };
    let places = [place(0..7, 2, 3, 0), place(7..7, 0, 5, 2), place(7..40, 3, 0, 0), place(40..41, 1, 1, 0)];
    for (scale, softcap) in [(None, None), (Some(0.5), Some(1.5))] {
        attend(&places, scale, softcap);
    }
}

fn attend(places: &[CachedSequence; 4], scale: Option<f32>, softcap: Option<f32>) {
    let (heads, key_heads, width, slots, capacity) = (6, 2, 20, 4, 5);
    let (q, prompts) = (noise(4, heads * width, 1), [2, 3].map(|seed| noise(41, key_heads * width, seed)));
    let tails = [4, 5].map(|seed| noise(slots * capacity, key_heads * width, seed));
    let mut expected = Vec::new();
    for (i, place) in places.iter().enumerate() {
        let rows: Vec<usize> = place.prompt.clone().collect();
        let keys = rows.len() + place.tail - place.skip;
        let at = |which: usize, key: usize, column: usize| match rows.get(key) {
            Some(row) => prompts[which].at(*row, column),
            None => tails[which].at(place.slot * capacity + place.skip + key - rows.len(), column),
        };
        for head in 0..heads {
            let first = head / (heads / key_heads) * width;
            let score = |key: usize| {
                let products = (0..width).map(|c| q.at(i, head * width + c) * at(0, key, first + c));
                let score = products.sum::<f64>() * scale.map_or(1.0 / (width as f64).sqrt(), f64::from);
                softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            };
            let weights: Vec<f64> = (0..keys).map(|key| score(key).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mixed = |c: usize| (0..keys).map(|key| weights[key] / sum * at(1, key, first + c)).sum::<f64>();
            expected.extend((0..width).map(mixed));
        }
    }
    for device in devices() {
        let tail = |x: &Exact| x.upload(&device).reshape([slots, capacity, key_heads * width]);
        let call = DecodeCall { heads, key_heads, sequences: places.to_vec().into(), scale, softcap };
        let [pk, pv] = prompts.each_ref().map(|x| x.upload(&device));
        let out = attend_rows(q.upload(&device), [pk, pv], [tail(&tails[0]), tail(&tails[1])], call);
        assert_near("attention of rows", &download(out), &expected, 1e-5);
    }
    #[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
    {
        use burn::backend::Flex;
        use burn::backend::ops::FloatTensorOps;
        use burn::tensor::TensorData;
        let upload = |x: &Exact, shape: Vec<usize>| {
            let values: Vec<f32> = x.values.iter().map(|v| *v as f32).collect();
            Flex::float_from_data(TensorData::new(values, shape), &Default::default())
        };
        let columns = key_heads * width;
        let prompts = prompts.each_ref().map(|x| upload(x, vec![41, columns]));
        let tails = tails.each_ref().map(|x| upload(x, vec![slots, capacity, columns]));
        let call = DecodeCall { heads, key_heads, sequences: places.to_vec().into(), scale, softcap };
        let out = decode::attend_by_index::<Flex>(upload(&q, vec![4, heads * width]), prompts, tails, &call);
        assert_near("that of any backend", out.storage::<f32>(), &expected, 1e-5);
    }
}

#[test]
fn store_writes_rows_to_their_slots() {
    for device in devices() {
        let rows = noise(3, 4, 9);
        let zeros = Tensor::<3>::zeros([3, 2, 4], (&device, DType::F32));
        let once = store_rows(zeros.clone(), rows.upload(&device), &[(2, 0), (0, 1), (1, 1)]);
        let twice = store_rows(once, rows.upload(&device), &[(0, 0), (2, 1), (1, 0)]);
        let again = store_rows(twice.clone(), rows.upload(&device), &[(2, 1), (0, 1), (2, 0)]);
        let expected = |stored: &[(usize, usize)]| {
            let mut values = vec![0.0; 24];
            for (row, at) in stored {
                (0..4).for_each(|c| values[at * 4 + c] = rows.at(*row, c));
            }
            values
        };
        let first = [(0, 4), (1, 1), (2, 3), (0, 0), (1, 5), (2, 2)];
        assert_near("stored rows", &download(twice), &expected(&first), 0.0);
        let second = [(2, 3), (0, 0), (2, 2), (0, 5), (1, 1), (2, 4)];
        assert_near("overwritten rows", &download(again), &expected(&second), 0.0);
        assert!(download(zeros).iter().all(|v| *v == 0.0), "a tensor with another handle was overwritten");
        let broken = Tensor::<3>::full([3, 2, 4], f32::NAN, (&device, DType::F32));
        let mended = download(store_rows(broken, rows.upload(&device), &[(2, 0), (0, 1), (1, 1)]));
        let is_stored = |at: usize| [1, 3, 4].contains(&(at / 4));
        assert!(mended.iter().enumerate().all(|(at, v)| v.is_finite() == is_stored(at)), "{mended:?}");
    }
}

#[test]
#[cfg(feature = "flex")]
fn store_by_index_is_exact() {
    use burn::backend::Flex;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::TensorData;
    let upload = |values: &[f32], shape: [usize; 2]| {
        Flex::float_from_data(TensorData::new(values.to_vec(), shape), &Default::default())
    };
    // Values for which adding a difference of new and old value would lose digits.
    let (before, row) = ([1e8f32, f32::NAN, 0.1, 1e-20, 5.5, 7.25], [1.0f32, 1e-7]);
    let into = Flex::float_from_data(TensorData::new(before.to_vec(), [1, 3, 2]), &Default::default());
    let stored = decode::store_by_index::<Flex>(into, upload(&row, [1, 2]), &[0]);
    assert_eq!(stored.storage::<f32>(), [1.0, 1e-7, 0.1, 1e-20, 5.5, 7.25]);
}
