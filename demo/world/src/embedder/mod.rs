//! `demo-world embedder`: an ArcFace-style network whose embeddings distinguish the faces of the demo world.

mod loss;
mod samples;

use std::path::Path;

use roll_core::Result;

use crate::files;
use crate::network::{Network, Window, evaluate};
use crate::onnx_writer;
use crate::training::batches::for_each_batch;
use crate::training::{Plan, Trainer, initial_values, upload};

/// Width of an embedding.
pub const WIDTH: usize = 512;
/// Side of a crop in pixels.
const CROP: usize = roll_rewards::insightface::align::CROP;

/// Purpose of an embedder. It determines the people in the training data and the name of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The embedder of the reward.
    Reward,
    /// The embedder of a judge that is never used as a reward. If the two disagree, the reward was hacked.
    Check,
}

impl Role {
    /// Returns the role for a seed: the reward for seed 1, a judge for any other.
    pub fn of(seed: u64) -> Self {
        if seed == 1 { Self::Reward } else { Self::Check }
    }

    /// Returns the first identity in the training data. The two roles are trained on different people.
    fn first_identity(self) -> u64 {
        match self {
            Self::Reward => 0,
            Self::Check => 5000,
        }
    }

    /// Returns the path of the file below the output directory.
    pub fn file(self) -> &'static str {
        match self {
            Self::Reward => "face/arcface_demo.onnx",
            Self::Check => "face_check/arcface_check.onnx",
        }
    }
}

/// Returns the network, which maps crops `[N, 3, 112, 112]` to embeddings `[N, 512]`.
///
/// A crop shows about 35 x 35 pixels of a frame, enlarged. So the first layer can have stride 4 without losing detail.
pub fn network() -> Network {
    let mut net = Network::new([CROP; 2]);
    let x = net.conv_prelu("stem", Network::INPUT, [3, 32], Window { kernel: 6, stride: 4, padding: 1 });
    let x = net.conv_prelu("down14", x, [32, 64], Window::three(2));
    let x = net.residual("keep14", x, 64);
    let x = net.conv_prelu("down7", x, [64, 128], Window::three(2));
    let x = net.residual("keep7", x, 128);
    let x = net.depthwise("places", x, 128, Window { kernel: 7, stride: 1, padding: 0 });
    let x = net.flatten("features", x);
    let x = net.linear("embedding", x, [128, WIDTH]);
    net.output("embedding", x, [WIDTH]);
    net
}

/// Trains an embedder and writes its file below `out`. `steps` overrides the number of updates.
pub fn train(seed: u64, steps: Option<u64>, out: &Path) -> Result<()> {
    let role = Role::of(seed);
    let device = roll_backends::device("flex")?;
    let network = network();
    let plan = Plan {
        name: format!("embedder (seed {seed})"),
        steps: steps.unwrap_or(2400),
        parts: 2,
        batch: 16,
        learning_rate: 2e-3,
        warmup: 100,
        weight_decay: 5e-4,
        muon: None,
        report_every: 100,
    };
    let mut specs = network.parameters.clone();
    specs.push(loss::classes());
    let values = initial_values(&specs, seed);
    let Plan { steps, parts, batch, .. } = plan;
    let mut trainer = Trainer::new(plan, specs, values, &device)?;
    let make = |step| Ok(samples::batches(seed, role.first_identity(), step, parts, batch));
    for_each_batch(steps, make, |samples| {
        let margin = loss::margin(trainer.step(), steps);
        trainer.update(samples, |samples, scope| {
            let crops = upload(samples.crops, [batch, 3, CROP, CROP], &device);
            let embedding = evaluate(&network, crops, scope, &[network.outputs[0].1])?.remove(0);
            loss::identity(embedding.rank()?, &samples.classes, margin, scope, &device)
        })?;
        Ok(())
    })?;
    files::write(&out.join(role.file()), &onnx_writer::encode(&network, trainer.values()))
}
