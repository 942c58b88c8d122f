//! A reward of random weights that costs about as much as a small face embedder: a few strided convolutions over the
//! middle of every frame.

use burn_tensor::{Device, Distribution, Tensor as Burn, module::conv2d, ops::ConvOptions};
use roll_backends::{NdTensor, Tape, host, ops, vjp};
use roll_core::{Error, Pullback, Result, Tensor};

/// Side of the scored square in pixels, the input of a face embedder. Smaller frames are scored whole.
pub const SIDE: usize = 112;
/// Channels of the picture, and after each convolution.
pub const WIDTHS: [usize; 5] = [3, 64, 128, 256, 512];

/// The network.
pub struct Scorer {
    /// One `[outputs, inputs, 3, 3]` for each convolution.
    kernels: Vec<Burn<4>>,
    device: Device,
}

impl Scorer {
    pub fn new(device: &Device) -> Self {
        let mut kernels = Vec::new();
        for channels in WIDTHS.windows(2) {
            let (inputs, outputs) = (channels[0], channels[1]);
            // Each output sums nine taps of every input: this deviation keeps activations at their size.
            let deviation = 1.0 / (9.0 * inputs as f64).sqrt();
            kernels.push(Burn::random([outputs, inputs, 3, 3], Distribution::Normal(0.0, deviation), device));
        }
        Self { kernels, device: device.clone() }
    }

    /// The score of frames `[T, 3, H, W]`, and its pullback to them.
    pub fn score(&self, frames: &Tensor) -> Result<(f64, Pullback)> {
        let &[t, _, h, w] = frames.shape() else {
            return Err(Error::shape("frames", "[T, 3, H, W]", frames.shape()));
        };
        let [side_h, side_w] = [h.min(SIDE), w.min(SIDE)];
        let input = host::to_device_nd(frames, &self.device)?;
        let (values, recorded) = vjp(&[input], Tape::off(), |inputs, _| {
            // The middle of each frame.
            let mut x = inputs[0].rank::<4>()?.narrow(2, (h - side_h) / 2, side_h).narrow(3, (w - side_w) / 2, side_w);
            for kernel in &self.kernels {
                let (stride, padding, dilation, groups) = ([2, 2], [1, 1], [1, 1], 1);
                let options = ConvOptions::new(stride, padding, dilation, groups);
                x = ops::silu(conv2d(x, kernel.clone(), None, options));
            }
            Ok(vec![(x.sum() / t as f64).into()])
        })?;
        let score = f64::from(host::to_host_nd(&values[0])?.item()?);
        let device = self.device.clone();
        let pullback = Pullback::new(move |cotangent: &Tensor| {
            let cotangent: NdTensor = host::to_device::<1>(&cotangent.reshape([1])?, &device)?.into();
            let frames = recorded.pull(vec![Some(cotangent)], None).pop().flatten();
            host::to_host_nd(&frames.ok_or_else(|| Error::Misuse("the score depends on no frame".into()))?)
        });
        Ok((score, pullback))
    }
}
