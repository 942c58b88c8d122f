//! The plan's formula for the work on blocks, against the bytes that the allocator counts. The only test of its process.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use roll_core::plan::{Needs, PlanInput, Speed};
use roll_core::{
    BuildContext, Component, Grad, Medium, PlannedReads, Positions, Tensor, VisionLanguageModel,
    VisionLanguageRegistration, open_vision_language,
};
use roll_network::weights::save_safetensors;
use roll_qwen_vl::QwenVlConfig;
use serde_json::{Value, json};

/// The system's allocator, with the bytes that are in use and their maximum.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let in_use = IN_USE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(in_use, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `alloc` has the pointer from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Frames, height and width of the clip: 4 time steps of 24 x 24 patches.
const CLIP: [usize; 4] = [8, 3, 96, 96];
/// Words after the clip.
const WORDS: usize = 64;

/// The `config.json` of a network, narrow in one part.
fn config(tower: usize, language: usize) -> Value {
    json!({
        "model_type": "qwen2_vl", "vocab_size": 64, "hidden_size": language, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 3 * language,
        "tie_word_embeddings": true, "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [language / 32, language / 32, language / 16]},
        "vision_start_token_id": 60, "vision_end_token_id": 61, "image_token_id": 62, "video_token_id": 63,
        "vision_config": {
            "depth": 4, "embed_dim": tower, "num_heads": 4, "mlp_ratio": 4, "hidden_size": language,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    })
}

fn write_network(directory: &Path, config: &Value) {
    let parsed = QwenVlConfig::parse(config.to_string().as_bytes(), None).unwrap();
    let shapes = parsed.vision.weights(parsed.text.dim).into_iter().chain(parsed.text.weights());
    let tensors: BTreeMap<String, Tensor> = shapes.map(|(name, shape)| (name, Tensor::full(shape, 0.02))).collect();
    save_safetensors(directory.join("model.safetensors"), &tensors, &BTreeMap::new()).unwrap();
    std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
}

/// Bytes beyond those in use at the beginning that `work` takes at its peak.
fn peak_of(work: impl FnOnce()) -> usize {
    let before = IN_USE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    PEAK.load(Ordering::Relaxed) - before
}

/// The planned bytes besides weights.
fn planned(component: &Component, tokens: usize, count: [usize; 2]) -> usize {
    let input = PlanInput {
        network: None,
        frames: CLIP[0],
        size: None,
        memory: None,
        samples: 1,
        ranks: 1,
        passes: Default::default(),
        division: Default::default(),
        speed: Speed { flops: 1e9, link: 1.0, read: 1.0 },
    };
    let reads = PlannedReads { tokens, media: vec![CLIP], count };
    let registration = VisionLanguageRegistration::of(component).unwrap();
    let context = BuildContext { headers_only: true, ..BuildContext::new("flex") };
    let needs: Needs = (registration.needs)("model", &component.options, &reads, &input, &context).unwrap();
    needs.memory.iter().filter(|item| item.name != "weights").map(|item| item.device).sum()
}

#[test]
fn planned_bytes_of_a_read_and_its_pullback_are_those_that_are_allocated() {
    let tokens = |model: &dyn VisionLanguageModel| {
        let placeholders = vec![63; model.facts().tokens_of(&CLIP).unwrap()];
        [vec![60], placeholders, vec![61], vec![1; WORDS]].concat()
    };
    for (tower, language) in [(256, 64), (64, 512), (128, 256)] {
        let directory = tempfile::tempdir().unwrap();
        write_network(directory.path(), &config(tower, language));
        for recomputed in [true, false] {
            let options = json!({"model_path": directory.path(), "use_gradient_checkpointing": recomputed});
            let component = Component { name: "qwen_vl".into(), options: serde_json::from_value(options).unwrap() };
            let mut model = open_vision_language("model", &component, &BuildContext::new("flex")).unwrap();
            let tokens = tokens(model.as_ref());
            let media = [Medium::new(Tensor::full(CLIP, 0.5))];
            let last = [tokens.len() - 1];
            for grad in [Grad::Skip, Grad::Record] {
                let counted = peak_of(|| {
                    let (states, pullback) = model.read(&tokens, &media, Positions::Sequential, &last, grad).unwrap();
                    if let Some(pullback) = pullback {
                        drop(pullback.pull(&Tensor::full(states.shape(), 1.0)).unwrap());
                    }
                });
                let count = if grad.is_on() { [0, 1] } else { [1, 0] };
                let ratio = planned(&component, tokens.len(), count) as f64 / counted as f64;
                println!("{tower} {language} {recomputed} {grad:?}: {counted} B, planned {ratio:.3}");
                let case = format!("widths {tower} and {language}, recomputed: {recomputed}, {grad:?}");
                assert!((0.85..=1.15).contains(&ratio), "{case}: {ratio:.3} of {counted} B are planned");
            }
        }
    }
}
