//! The bytes that a decode with its pullback holds at its peak, counted by the allocator, beside those that `roll plan`
//! assumes, at the published widths. The only test of its process: the allocator counts all threads.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use roll_core::{Grad, Noise, Purpose, Tensor};
use roll_z_image::vae::{DECODER_WORDS, Vae, VaeConfig};

/// The system's allocator, which counts the bytes in use and their peak.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(IN_USE.fetch_add(layout.size(), SeqCst) + layout.size(), SeqCst);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: `pointer` came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_planned_bytes_of_the_decoder_are_those_that_it_takes() {
    let config = VaeConfig::default();
    let device = roll_backends::device("flex").unwrap();
    let vae = Vae::new(config.clone(), &config.random_state(1).unwrap(), &device).unwrap();
    let normal = |shape: &[usize], sample| Noise::new(1).normal(Purpose::Synthetic, 0, sample, shape).unwrap();
    let run = |latents: &Tensor, cotangent: &Tensor| {
        let (_, pullback) = vae.decode(latents, Grad::Record).unwrap();
        drop(pullback.unwrap().pull(cotangent).unwrap());
    };
    let small = (normal(&[16, 1, 4, 4], 0), normal(&[1, 3, 32, 32], 1));
    // Makes pools of threads and what else lasts.
    run(&small.0, &small.1);
    for [height, width] in [[16, 16], [16, 32]] {
        let latents = normal(&[config.latent_channels, 1, height, width], 2);
        let cotangent = normal(&[1, 3, 8 * height, 8 * width], 3);
        let before = IN_USE.load(SeqCst);
        PEAK.store(before, SeqCst);
        run(&latents, &cotangent);
        let counted = PEAK.load(SeqCst) - before;
        let planned = config.decoder_bytes([height, width], size_of::<f32>(), DECODER_WORDS[0]);
        let ratio = planned as f64 / counted as f64;
        println!("{height}x{width}: counted {:.1} MB, planned {:.1} MB", counted as f64 / 1e6, planned as f64 / 1e6);
        assert!((0.9..1.1).contains(&ratio), "{height}x{width}: planned {planned}, counted {counted}");
    }
}
