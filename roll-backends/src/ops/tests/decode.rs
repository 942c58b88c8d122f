//! Tests of decode attention over prompt and tail, compared with the same formula in f64.

use std::sync::Arc;

use burn_tensor::{DType, Tensor};

use super::{Exact, assert_near, devices, download, noise};
use crate::ops::{CachedSequence, CachedSequences, DecodeCall, TailPlaces, attend_rows, decode, store_rows};

/// Covers a prompt with a tail, a tail with a masked beginning, prompts of different lengths, and a prompt without a
/// tail.
#[test]
fn decode_attention_matches_f64() {
    let place = |prompt, slot, tail, skip| CachedSequence { prompt, slot, tail, skip };
    // The empty prompt lies between others, or at the end of the prompt cache.
    for (empty, scale, softcap) in [(7..7, None, None), (41..41, Some(0.5), Some(1.5))] {
        let places = [place(0..7, 2, 3, 0), place(empty, 0, 5, 2), place(7..40, 3, 0, 0), place(40..41, 1, 1, 0)];
        attend(&places, scale, softcap);
    }
}

fn sequences(rows: &[CachedSequence]) -> Arc<CachedSequences> {
    Arc::new(rows.to_vec().into())
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
        let call = DecodeCall { heads, key_heads, sequences: sequences(places), scale, softcap };
        let [pk, pv] = prompts.each_ref().map(|x| x.upload(&device));
        let out = attend_rows(q.upload(&device), [pk, pv], [tail(&tails[0]), tail(&tails[1])], call);
        assert_near("attention of rows", &download(out), &expected, 1e-5);
    }
    #[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
    {
        use crate::backend::Flex;
        use crate::backend::ops::FloatTensorOps;
        use burn_tensor::TensorData;
        let upload = |x: &Exact, shape: Vec<usize>| {
            let values: Vec<f32> = x.values.iter().map(|v| *v as f32).collect();
            Flex::float_from_data(TensorData::new(values, shape), &Default::default())
        };
        let columns = key_heads * width;
        let prompts = prompts.each_ref().map(|x| upload(x, vec![41, columns]));
        let tails = tails.each_ref().map(|x| upload(x, vec![slots, capacity, columns]));
        let call = DecodeCall { heads, key_heads, sequences: sequences(places), scale, softcap };
        let out = decode::attend_by_index::<Flex>(upload(&q, vec![4, heads * width]), prompts, tails, &call);
        assert_near("that of any backend", out.storage::<f32>(), &expected, 1e-5);
    }
}

#[test]
fn store_writes_rows_to_their_slots() {
    for device in devices() {
        let rows = noise(3, 4, 9);
        let places = [[(2, 0), (0, 1), (1, 1)], [(0, 0), (2, 1), (1, 0)], [(2, 1), (0, 1), (2, 0)]];
        let [first, second, third] = places.map(|places| TailPlaces::from(places.to_vec()));
        let zeros = Tensor::<3>::zeros([3, 2, 4], (&device, DType::F32));
        let once = store_rows(zeros.clone(), rows.upload(&device), &first);
        let twice = store_rows(once, rows.upload(&device), &second);
        let again = store_rows(twice.clone(), rows.upload(&device), &third);
        let expected = |stored: &[(usize, usize)]| {
            let mut values = vec![0.0; 24];
            for (row, at) in stored {
                (0..4).for_each(|c| values[at * 4 + c] = rows.at(*row, c));
            }
            values
        };
        let stored = [(0, 4), (1, 1), (2, 3), (0, 0), (1, 5), (2, 2)];
        assert_near("stored rows", &download(twice), &expected(&stored), 0.0);
        let stored = [(2, 3), (0, 0), (2, 2), (0, 5), (1, 1), (2, 4)];
        assert_near("overwritten rows", &download(again), &expected(&stored), 0.0);
        assert!(download(zeros).iter().all(|v| *v == 0.0), "a tensor with another handle was overwritten");
        let broken = Tensor::<3>::full([3, 2, 4], f32::NAN, (&device, DType::F32));
        let mended = download(store_rows(broken, rows.upload(&device), &first));
        let is_stored = |at: usize| [1, 3, 4].contains(&(at / 4));
        assert!(mended.iter().enumerate().all(|(at, v)| v.is_finite() == is_stored(at)), "{mended:?}");
    }
}

#[test]
#[cfg(feature = "flex")]
fn store_by_index_is_exact() {
    use crate::backend::Flex;
    use crate::backend::ops::FloatTensorOps;
    use burn_tensor::TensorData;
    let upload = |values: &[f32], shape: [usize; 2]| {
        Flex::float_from_data(TensorData::new(values.to_vec(), shape), &Default::default())
    };
    // Values for which adding a difference of new and old value would lose digits.
    let (before, row) = ([1e8f32, f32::NAN, 0.1, 1e-20, 5.5, 7.25], [1.0f32, 1e-7]);
    let into = Flex::float_from_data(TensorData::new(before.to_vec(), [1, 3, 2]), &Default::default());
    let stored = decode::store_by_index::<Flex>(into, upload(&row, [1, 2]), &vec![(0, 0)].into());
    assert_eq!(stored.storage::<f32>(), [1.0, 1e-7, 0.1, 1e-20, 5.5, 7.25]);
}

/// Scores of some tens, which bf16 would round by up to a quarter.
#[test]
#[cfg(feature = "flex")]
fn decode_attention_of_bf16_has_scores_in_f32() {
    use crate::backend::Flex;
    use crate::backend::ops::FloatTensorOps;
    use burn_tensor::{FloatDType, TensorData};
    let (width, keys) = (16, 12);
    let rounded = |rows, seed| {
        let mut x = noise(rows, width, seed);
        x.values.iter_mut().for_each(|v| *v = f64::from(half::bf16::from_f64(*v * 4.0).to_f32()));
        x
    };
    let [q, k, v] = [rounded(1, 1), rounded(keys, 2), rounded(keys, 3)];
    let score = |key: usize| (0..width).map(|c| q.at(0, c) * k.at(key, c)).sum::<f64>() / (width as f64).sqrt();
    let largest = (0..keys).map(score).fold(f64::MIN, f64::max);
    assert!(largest > 16.0, "{largest}");
    let weights: Vec<f64> = (0..keys).map(|key| (score(key) - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mixed = |c: usize| (0..keys).map(|key| weights[key] / sum * v.at(key, c)).sum::<f64>();
    let expected: Vec<f64> = (0..width).map(mixed).collect();
    let upload = |x: &Exact, shape: Vec<usize>| {
        let values: Vec<f32> = x.values.iter().map(|v| *v as f32).collect();
        Flex::float_cast(Flex::float_from_data(TensorData::new(values, shape), &Default::default()), FloatDType::BF16)
    };
    let place = CachedSequence { prompt: 0..keys, slot: 0, tail: 0, skip: 0 };
    let call = DecodeCall { heads: 1, key_heads: 1, sequences: sequences(&[place]), scale: None, softcap: None };
    let prompts = [&k, &v].map(|x| upload(x, vec![keys, width]));
    let tails = [&k, &v].map(|x| upload(x, vec![1, keys, width]));
    let out = decode::attend_by_index::<Flex>(upload(&q, vec![1, width]), prompts, tails, &call);
    let out = Flex::float_cast(out, FloatDType::F32);
    // The weights are rounded to bf16, and nothing else.
    assert_near("of bf16", out.storage::<f32>(), &expected, 4e-3);
}

/// Layers of one pass share their indices: each further upload would wait for the device.
#[test]
#[cfg(feature = "flex")]
fn indices_are_uploaded_once_for_all_layers() {
    use crate::backend::Flex;
    use crate::backend::ops::FloatTensorOps;
    use burn_tensor::TensorData;
    let upload = |shape: Vec<usize>| {
        let values = vec![0.5f32; shape.iter().product()];
        Flex::float_from_data(TensorData::new(values, shape), &Default::default())
    };
    let rows = sequences(&[CachedSequence { prompt: 0..3, slot: 1, tail: 2, skip: 0 }]);
    let places = TailPlaces::from(vec![(1, 1)]);
    let call = DecodeCall { heads: 1, key_heads: 1, sequences: rows.clone(), scale: None, softcap: None };
    for _layer in 0..3 {
        let tails = [0, 1].map(|_| decode::store_by_index::<Flex>(upload(vec![2, 2, 4]), upload(vec![1, 4]), &places));
        decode::attend_by_index::<Flex>(upload(vec![1, 4]), [0, 1].map(|_| upload(vec![3, 4])), tails, &call);
    }
    assert_eq!(format!("{rows:?}{places:?}").matches("1 uploads").count(), 2, "{rows:?} {places:?}");
    // Another capacity is another index.
    decode::store_by_index::<Flex>(upload(vec![2, 4, 4]), upload(vec![1, 4]), &places);
    assert!(format!("{places:?}").contains("2 uploads"), "{places:?}");
}
