//! Sizes of the VAE, read from the names and shapes of its checkpoint's weights, and the list of layers that follows
//! from the sizes.

use std::collections::{BTreeMap, BTreeSet};

use roll_core::{Error, Noise, Purpose, Result, StateDict, Tensor};

use super::layer::{Layer, LayerKind};
use super::rearrange::Factors;
use roll_network::shapes::WeightShapes;

/// The two published architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VaeVersion {
    /// Wan2.1 and the A14B models of Wan2.2: 16 channels, stride 4 x 8 x 8.
    V2_1,
    /// TI2V-5B: 48 channels, stride 4 x 16 x 16, shortcuts around each stage but the decoder's last.
    V2_2,
}

/// The sizes of a Wan VAE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VaeConfig {
    /// Architecture.
    pub version: VaeVersion,
    /// Width of the encoder's first stage.
    pub encoder_dim: usize,
    /// Width of the decoder's last stage.
    pub decoder_dim: usize,
    /// Channels of the latents.
    pub z_dim: usize,
    /// Width of each stage, as a multiple of the first.
    pub dim_mult: Vec<usize>,
    /// Residual blocks of an encoder stage; a decoder stage has one more.
    pub num_res_blocks: usize,
    /// Whether each encoder stage halves the time axis; the last stage has no entry.
    pub temporal_downsample: Vec<bool>,
}

impl VaeConfig {
    /// The published Wan2.1 VAE: 16 latent channels, stride 4x8x8.
    pub fn wan2_1() -> Self {
        Self {
            version: VaeVersion::V2_1,
            encoder_dim: 96,
            decoder_dim: 96,
            z_dim: 16,
            dim_mult: vec![1, 2, 4, 4],
            num_res_blocks: 2,
            temporal_downsample: vec![false, true, true],
        }
    }

    /// The published Wan2.2 VAE: 48 latent channels, stride 4x16x16.
    pub fn wan2_2() -> Self {
        Self { version: VaeVersion::V2_2, encoder_dim: 160, decoder_dim: 256, z_dim: 48, ..Self::wan2_1() }
    }

    /// Reads the sizes from the shapes of the weights (official keys), and checks that every weight is present in its
    /// shape.
    pub fn from_shapes(shapes: &BTreeMap<String, Vec<usize>>) -> Result<Self> {
        let config = derive_config(shapes)?;
        config.check(shapes)?;
        Ok(config)
    }

    /// Pixels per latent pixel, in height and width.
    pub fn spatial_stride(&self) -> usize {
        self.pixel_patch() << (self.dim_mult.len() - 1)
    }

    /// Side of the square of pixels that one position of the decoder's last stage represents.
    pub fn pixel_patch(&self) -> usize {
        match self.version {
            VaeVersion::V2_1 => 1,
            VaeVersion::V2_2 => 2,
        }
    }

    /// Video frames per latent frame; the first latent frame represents one video frame.
    pub fn temporal_stride(&self) -> usize {
        1 << self.temporal_downsample.iter().filter(|&&down| down).count()
    }

    /// Number of latent frames of a video of `frames` frames. Fails unless `frames` is a multiple of the temporal
    /// stride plus one.
    pub fn latent_frames(&self, frames: usize) -> Result<usize> {
        let stride = self.temporal_stride();
        if frames == 0 || !(frames - 1).is_multiple_of(stride) {
            return Err(Error::Unsupported(format!(
                "the VAE takes a multiple of {stride} frames plus one (1, {}, {}, ...), found {frames}",
                1 + stride,
                1 + 2 * stride
            )));
        }
        Ok(1 + (frames - 1) / stride)
    }

    /// Latent height and width of a picture. Fails unless the size is a multiple of the spatial stride.
    pub fn latent_size(&self, size: [usize; 2]) -> Result<[usize; 2]> {
        let stride = self.spatial_stride();
        if size.iter().any(|&n| n == 0 || !n.is_multiple_of(stride)) {
            return Err(Error::Unsupported(format!(
                "the VAE takes heights and widths that are multiples of {stride}, found {} x {}: resize or crop",
                size[0], size[1]
            )));
        }
        Ok(size.map(|n| n / stride))
    }

    /// Name (official) and shape of every weight.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        self.encoder_layers().iter().chain(&self.decoder_layers()).flat_map(Layer::weights).collect()
    }

    /// Random weights in the official layout, drawn from `seed` and scaled so that activations keep their magnitude.
    pub fn random_state(&self, seed: u64) -> Result<StateDict> {
        let noise = Noise::new(seed);
        let tensor = |(i, (key, shape)): (usize, (String, Vec<usize>))| {
            let mut uniform = noise.uniform(Purpose::Parameters, 0, i as u64);
            let fan_in: usize = shape.iter().skip(1).product();
            // Uniform in `centre` plus or minus `half_width`: gains near 1, small biases, and kernels.
            let (centre, half_width) = match key.rsplit('.').next() {
                Some("gamma") => (1.0, 0.1),
                Some("bias") => (0.0, 0.02),
                // The variance of a kernel, `half_width^2 / 3`, is 1 / fan_in.
                _ => (0.0, (3.0 / fan_in as f32).sqrt()),
            };
            let values = (0..shape.iter().product()).map(|_| centre + half_width * uniform()).collect::<Vec<f32>>();
            Ok((key.clone(), Tensor::new(values, shape)?))
        };
        self.weights().into_iter().enumerate().map(tensor).collect()
    }

    /// The layers of the encoder, from pixels to normalised latents.
    pub(super) fn encoder_layers(&self) -> Vec<Layer> {
        let dims = self.widths(self.encoder_dim);
        let is_v2_2 = self.version == VaeVersion::V2_2;
        let mut layers = Vec::new();
        if is_v2_2 {
            layers.push(Layer::new("patchify", LayerKind::Patchify));
        }
        let pixels = 3 * self.pixel_patch() * self.pixel_patch();
        layers.push(Layer::new("encoder.conv1", LayerKind::Conv { input: pixels, output: dims[0] }));
        // Channels between the layers so far and the next layer.
        let mut input = dims[0];
        let mut names = LayerNames::new("encoder.downsamples", "downsamples", is_v2_2);
        for (stage, &output) in dims.iter().enumerate() {
            let is_last = stage + 1 == dims.len();
            let halves_time = !is_last && self.temporal_downsample[stage];
            let factors =
                Factors { time: if halves_time { 2 } else { 1 }, space: if is_last { 1 } else { 2 }, channels: output };
            let stage_input = input;
            names.open_stage(&mut layers);
            for _ in 0..self.num_res_blocks {
                push_residual_block(&mut layers, names.next(), input, output);
                input = output;
            }
            if !is_last {
                layers.push(Layer::new(names.next(), LayerKind::Downsample { channels: output, halves_time }));
            }
            names.close_stage(&mut layers, LayerKind::AddAverage { input: stage_input, factors });
        }
        push_middle(&mut layers, "encoder", input);
        layers.push(Layer::new(
            "encoder.head",
            LayerKind::NormSiluConv { input, output: 2 * self.z_dim, norm: "0", conv: "2" },
        ));
        layers.push(Layer::new("conv1", LayerKind::ToLatents { channels: self.z_dim }));
        layers
    }

    /// The layers of the decoder, from normalised latents to pixels.
    pub(super) fn decoder_layers(&self) -> Vec<Layer> {
        let mut dims = self.widths(self.decoder_dim);
        dims.reverse();
        let is_v2_2 = self.version == VaeVersion::V2_2;
        let mut layers = vec![
            Layer::new("conv2", LayerKind::FromLatents { channels: self.z_dim }),
            Layer::new("decoder.conv1", LayerKind::Conv { input: self.z_dim, output: dims[0] }),
        ];
        // Channels between the layers so far and the next layer.
        let mut input = dims[0];
        push_middle(&mut layers, "decoder", input);
        let mut names = LayerNames::new("decoder.upsamples", "upsamples", is_v2_2);
        for (stage, &output) in dims.iter().enumerate() {
            let is_last = stage + 1 == dims.len();
            let stage_input = input;
            // The last stage has no shortcut.
            if !is_last {
                names.open_stage(&mut layers);
            }
            // One block more than in the encoder.
            for _ in 0..=self.num_res_blocks {
                push_residual_block(&mut layers, names.next(), input, output);
                input = output;
            }
            if is_last {
                break;
            }
            // The decoder doubles the time axis in the reverse order of the encoder's halving. The last entry of
            // `temporal_downsample`, at `dims.len() - 2`, is the decoder's first stage.
            let doubles_time = self.temporal_downsample[dims.len() - 2 - stage];
            // Upsampling halves the channels in the Wan2.1 VAE and keeps them in the Wan2.2 VAE.
            let resampled = if is_v2_2 { output } else { output / 2 };
            layers
                .push(Layer::new(names.next(), LayerKind::Upsample { input: output, output: resampled, doubles_time }));
            input = resampled;
            let factors = Factors { time: if doubles_time { 2 } else { 1 }, space: 2, channels: output };
            names.close_stage(&mut layers, LayerKind::AddDuplicate { input: stage_input, factors });
        }
        let pixels = 3 * self.pixel_patch() * self.pixel_patch();
        layers
            .push(Layer::new("decoder.head", LayerKind::NormSiluConv { input, output: pixels, norm: "0", conv: "2" }));
        if is_v2_2 {
            layers.push(Layer::new("unpatchify", LayerKind::Unpatchify));
        }
        layers
    }

    /// Channels of each stage, in the encoder's order. `narrowest` is the width at a multiple of 1.
    fn widths(&self, narrowest: usize) -> Vec<usize> {
        self.dim_mult.iter().map(|multiple| multiple * narrowest).collect()
    }

    /// Fails unless `shapes` contains every weight in its shape. Further keys are allowed unless they begin with
    /// `encoder.` or `decoder.`.
    fn check(&self, shapes: &BTreeMap<String, Vec<usize>>) -> Result<()> {
        let weights = self.weights();
        weight_shapes(shapes).check(&weights)?;
        let expected: BTreeSet<_> = weights.iter().map(|(key, _)| key).collect();
        let is_in_network = |key: &&String| key.starts_with("encoder.") || key.starts_with("decoder.");
        if let Some(key) = shapes.keys().filter(is_in_network).find(|key| !expected.contains(key)) {
            return Err(Error::Unsupported(format!(
                "the weight `{key}` does not belong to a Wan VAE with {} stages of {} residual blocks",
                self.dim_mult.len(),
                self.num_res_blocks
            )));
        }
        for layer in self.encoder_layers().iter().chain(&self.decoder_layers()) {
            layer.check()?;
        }
        Ok(())
    }
}

/// Appends a residual block: twice norm, SiLU and convolution, plus a shortcut.
fn push_residual_block(layers: &mut Vec<Layer>, name: String, input: usize, output: usize) {
    // The official block is the list [norm, SiLU, convolution, norm, SiLU, dropout, convolution]; `norm` and `conv` are
    // positions in this list.
    let inside = format!("{name}.residual");
    layers.push(Layer::new(&name, LayerKind::Branch));
    layers.push(Layer::new(&inside, LayerKind::NormSiluConv { input, output, norm: "0", conv: "2" }));
    layers.push(Layer::new(&inside, LayerKind::NormSiluConv { input: output, output, norm: "3", conv: "6" }));
    layers.push(Layer::new(name, LayerKind::AddResidual { input, output }));
}

/// Appends two residual blocks with an attention between them. `network` is `encoder` or `decoder`.
fn push_middle(layers: &mut Vec<Layer>, network: &str, channels: usize) {
    push_residual_block(layers, format!("{network}.middle.0"), channels, channels);
    layers.push(Layer::new(format!("{network}.middle.1"), LayerKind::Attention { channels }));
    push_residual_block(layers, format!("{network}.middle.2"), channels, channels);
}

/// Generates layer names: `{outer}.{layer}`, numbered consecutively, in the Wan2.1 VAE, and
/// `{outer}.{stage}.{inner}.{layer}`, numbered per stage, in the Wan2.2 VAE.
struct LayerNames {
    outer: &'static str,
    inner: &'static str,
    /// Whether names contain the stage, as in the Wan2.2 VAE.
    has_stages: bool,
    /// Number of the current stage. Stays 0 unless names contain it.
    stage: usize,
    /// Number of the next layer.
    layer: usize,
}

impl LayerNames {
    fn new(outer: &'static str, inner: &'static str, has_stages: bool) -> Self {
        Self { outer, inner, has_stages, stage: 0, layer: 0 }
    }

    /// Returns the name of the next layer.
    fn next(&mut self) -> String {
        let Self { outer, inner, stage, layer, .. } = self;
        let name =
            if self.has_stages { format!("{outer}.{stage}.{inner}.{layer}") } else { format!("{outer}.{layer}") };
        self.layer += 1;
        name
    }

    /// Appends the start of the stage's shortcut. Stages of the Wan2.1 VAE have no shortcuts.
    fn open_stage(&self, layers: &mut Vec<Layer>) {
        if self.has_stages {
            layers.push(Layer::new(format!("{}.{}", self.outer, self.stage), LayerKind::Branch));
        }
    }

    /// Appends the end of the stage's shortcut, and goes on to the next stage.
    fn close_stage(&mut self, layers: &mut Vec<Layer>, shortcut: LayerKind) {
        if self.has_stages {
            layers.push(Layer::new(format!("{}.{}", self.outer, self.stage), shortcut));
            self.stage += 1;
            self.layer = 0;
        }
    }
}

/// Derives the configuration from a few weights; [`VaeConfig::check`] then compares it with every weight.
fn derive_config(shapes: &BTreeMap<String, Vec<usize>>) -> Result<VaeConfig> {
    let missing = |key: &str| weight_shapes(shapes).missing(key);
    // The first axis of a weight is its output channels.
    let output_channels = |key: &str| -> Result<usize> {
        match shapes.get(key).ok_or_else(|| missing(key))?.first() {
            Some(&n) if n > 0 => Ok(n),
            _ => Err(Error::shape(format!("the weight `{key}`"), "at least one output channel", &shapes[key])),
        }
    };
    let is_v2_2 = shapes.keys().any(|k| k.starts_with("encoder.downsamples.0.downsamples."));
    let encoder_dim = output_channels("encoder.conv1.weight")?;
    let stages = if is_v2_2 { nested_stages(shapes) } else { flat_stages(shapes) };
    let Some((last_stage, other_stages)) = stages.split_last() else { return Err(missing("encoder.downsamples.0")) };
    let mut dim_mult = Vec::new();
    for stage in &stages {
        let block = stage.blocks.last().ok_or_else(|| missing(&format!("{}.residual.6.weight", stage.name)))?;
        let key = format!("{block}.residual.6.weight");
        let width = output_channels(&key)?;
        if !width.is_multiple_of(encoder_dim) {
            return Err(Error::shape(
                format!("the weight `{key}`"),
                format!("a multiple of {encoder_dim} output channels, the width of `encoder.conv1`"),
                &shapes[&key],
            ));
        }
        dim_mult.push(width / encoder_dim);
    }
    // The decoder's last stage is as wide as its head's input.
    let decoder_key = "decoder.head.0.gamma";
    let decoder_width = output_channels(decoder_key)?;
    if !decoder_width.is_multiple_of(dim_mult[0]) {
        let expected = format!("a multiple of {}, as in the encoder", dim_mult[0]);
        return Err(Error::shape(format!("the weight `{decoder_key}`"), expected, &shapes[decoder_key]));
    }
    Ok(VaeConfig {
        version: if is_v2_2 { VaeVersion::V2_2 } else { VaeVersion::V2_1 },
        encoder_dim,
        decoder_dim: decoder_width / dim_mult[0],
        z_dim: output_channels("conv2.weight")?,
        num_res_blocks: last_stage.blocks.len(),
        temporal_downsample: other_stages.iter().map(|stage| stage.halves_time).collect(),
        dim_mult,
    })
}

/// An encoder stage.
#[derive(Default)]
struct Stage {
    /// A name for error messages: the stage's, or its last layer's if stages have no names.
    name: String,
    /// Names of the residual blocks.
    blocks: Vec<String>,
    /// Whether the stage halves the time axis.
    halves_time: bool,
}

/// The encoder's stages in the Wan2.1 VAE, whose layers are numbered without regard to stages: a stage ends at its
/// downsampling, and the last stage at the last layer.
fn flat_stages(shapes: &BTreeMap<String, Vec<usize>>) -> Vec<Stage> {
    let mut stages = vec![Stage::default()];
    for i in 0.. {
        let name = format!("encoder.downsamples.{i}");
        let has_weight = |part: &str| shapes.contains_key(&format!("{name}.{part}.weight"));
        let Some(stage) = stages.last_mut() else { break };
        stage.name.clone_from(&name);
        // A downsampling, a residual block, or the end.
        if has_weight("resample.1") {
            stage.halves_time = has_weight("time_conv");
            stages.push(Stage::default());
        } else if has_weight("residual.6") {
            stage.blocks.push(name);
        } else {
            break;
        }
    }
    stages
}

/// The encoder's stages in the Wan2.2 VAE, whose layers are numbered per stage: residual blocks, then the downsampling.
fn nested_stages(shapes: &BTreeMap<String, Vec<usize>>) -> Vec<Stage> {
    let mut stages = Vec::new();
    for i in 0.. {
        let name = format!("encoder.downsamples.{i}");
        let layers = (0..).map(|j| format!("{name}.downsamples.{j}"));
        let is_block = |layer: &String| shapes.contains_key(&format!("{layer}.residual.6.weight"));
        let blocks: Vec<_> = layers.take_while(is_block).collect();
        if blocks.is_empty() {
            break;
        }
        let halves_time = shapes.contains_key(&format!("{name}.downsamples.{}.time_conv.weight", blocks.len()));
        stages.push(Stage { name, blocks, halves_time });
    }
    stages
}

/// The shapes of a VAE's weights, with the network's name for errors.
fn weight_shapes(shapes: &BTreeMap<String, Vec<usize>>) -> WeightShapes<'_> {
    WeightShapes { network: "Wan VAE", shapes }
}
