//! `demo-world detector`: a face detector with the outputs of SCRFD.

mod anchors;
pub mod clutter;
mod loss;
mod samples;

use std::path::Path;

use roll_core::Result;

use crate::files;
use crate::network::{Network, Value, Window, evaluate};
use crate::onnx_writer;
use crate::training::batches::for_each_batch;
use crate::training::{Plan, Trainer, initial_values, upload};

/// Side of the pictures in pixels.
pub const SIDE: usize = 64;
/// The files below the output directory. Each embedder has a detector in its folder.
pub const FILES: [&str; 2] = ["face/scrfd_demo.onnx", "face_check/scrfd_demo.onnx"];

/// Channels of the feature maps at strides 8, 16 and 32.
const LEVELS: [usize; 3] = [40, 56, 64];
/// Channels inside a head.
const HEAD: usize = 40;
/// Seed of the training.
const SEED: u64 = 7;

/// Returns the network and the values that the loss reads. The network maps pictures `[N, 3, 64, 64]` to SCRFD's nine
/// outputs: scores, boxes and landmarks at strides 8, 16 and 32. The loss reads, for each level, the scores before the
/// sigmoid, the boxes and the landmarks.
pub fn network() -> (Network, [[Value; 3]; 3]) {
    let mut net = Network::new([SIDE; 2]);
    let x = net.conv_prelu("stem", Network::INPUT, [3, 16], Window::three(2));
    let x = net.conv_prelu("down16", x, [16, 24], Window::three(2));
    let x = net.residual("keep16", x, 24);
    let x = net.conv_prelu("down8", x, [24, LEVELS[0]], Window::three(2));
    let x = net.residual("keep8.0", x, LEVELS[0]);
    let stride8 = net.residual("keep8.1", x, LEVELS[0]);
    let x = net.conv_prelu("down4", stride8, [LEVELS[0], LEVELS[1]], Window::three(2));
    let stride16 = net.residual("keep4", x, LEVELS[1]);
    let x = net.conv_prelu("down2", stride16, [LEVELS[1], LEVELS[2]], Window::three(2));
    let stride32 = net.residual("keep2", x, LEVELS[2]);
    let read = [stride8, stride16, stride32];
    let levels: [[Value; 3]; 3] = std::array::from_fn(|i| head(&mut net, anchors::STRIDES[i], read[i], LEVELS[i]));
    for (part, width) in PARTS.into_iter().enumerate() {
        for (stride, level) in anchors::STRIDES.into_iter().zip(levels) {
            let value = if part == 0 { net.sigmoid(&format!("score{stride}.share"), level[0]) } else { level[part] };
            let (part, count) = (["score", "bbox", "kps"][part], anchors::per_level(stride));
            net.output(&format!("{part}_{stride}"), value, [count, width]);
        }
    }
    (net, levels)
}

/// Numbers per anchor: its score, the distances to the sides of the box, five points.
const PARTS: [usize; 3] = [1, 4, 10];

fn head(net: &mut Network, stride: usize, x: Value, channels: usize) -> [Value; 3] {
    let name = |part: &str| format!("{part}{stride}");
    let x = net.conv_prelu(&name("head"), x, [channels, HEAD], Window::three(1));
    let mut part = |part: &str, width: usize| {
        let map = net.conv(&name(part), x, [HEAD, anchors::PER_POSITION * width], Window::one());
        net.rows(&format!("{part}{stride}.rows"), map, width)
    };
    [part("score", PARTS[0]), part("box", PARTS[1]), part("kps", PARTS[2])]
}

/// Trains the detector and writes its files below `out`. `steps` overrides the number of updates.
pub fn train(steps: Option<u64>, out: &Path) -> Result<()> {
    let device = roll_backends::device("flex")?;
    let (network, levels) = network();
    let plan = Plan {
        name: "detector".into(),
        steps: steps.unwrap_or(2500),
        parts: 2,
        batch: 24,
        learning_rate: 3e-3,
        warmup: 100,
        weight_decay: 1e-4,
        muon: None,
        report_every: 100,
    };
    let Plan { steps, parts, batch, .. } = plan;
    let mut values = initial_values(&network.parameters, SEED);
    loss::start_with_few_faces(&network, &mut values);
    let mut trainer = Trainer::new(plan, network.parameters.clone(), values, &device)?;
    let wanted = levels.concat();
    let make = |step| Ok(samples::batches(SEED, step, parts, batch));
    for_each_batch(steps, make, |samples| {
        trainer.update(samples, |samples, scope| {
            let pictures = upload(samples.pictures, [batch, 3, SIDE, SIDE], &device);
            let outputs = evaluate(&network, pictures, scope, &wanted)?;
            loss::detection(&outputs, samples.targets, batch, &device)
        })?;
        Ok(())
    })?;
    let bytes = onnx_writer::encode(&network, trainer.values());
    FILES.iter().try_for_each(|file| files::write(&out.join(file), &bytes))
}
