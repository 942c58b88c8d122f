//! The inputs of a pass over several samples: checked, cut into tokens, and joined to matrices whose rows are the
//! tokens of one sample after the other.

use roll_core::{Conditioning, Error, Result, Tensor, Timestep, VelocityInput};

use super::config::DitConfig;
use super::rope::rotary_tables;
use roll_network::patch::{Grid, Order};

/// The checked inputs of a pass, in host memory.
pub(super) struct Batch {
    pub(super) shape: BatchShape,
    /// Patches of the latents and the conditioning channels, `[B * tokens, in_channels * patch]`; `patch` is the
    /// number of latent positions that a patch covers.
    pub(super) tokens: Tensor,
    /// One timestep per group of tokens, see `groups`.
    pub(super) timesteps: Vec<Timestep>,
    /// Number of tokens in each group. The tokens of a group share a timestep. Each sample has one group, or two if its
    /// first frame is known.
    pub(super) groups: Vec<usize>,
    /// Text embeddings, `[B * text_rows, text_dim]`.
    pub(super) context: Tensor,
    /// CLIP image tokens, `[B * image_rows, image_dim]`, for models with an image branch.
    pub(super) image_tokens: Option<Tensor>,
    /// Number of image tokens of one sample.
    pub(super) image_rows: usize,
}

/// Number of samples, and the patch grid that all of them have.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct BatchShape {
    pub(super) samples: usize,
    grid: Grid,
}

impl Batch {
    /// Fails unless the inputs fit the model and each other.
    pub(super) fn new(inputs: &[VelocityInput<'_>], config: &DitConfig) -> Result<Self> {
        let Some(first) = inputs.first() else {
            return Err(Error::Misuse("velocities of no inputs were requested".into()));
        };
        let latents: Result<Vec<Tensor>> =
            inputs.iter().map(|input| with_channels(config, input.latents, input.conditioning)).collect();
        let latents = Tensor::stack(&latents?)?;
        let shape = BatchShape { samples: inputs.len(), grid: Grid::new(&latents.shape()[1..], config.patch)? };

        // The tokens of a known first frame (TI2V) come first and have timestep zero.
        let has_known_frame = |input: &VelocityInput<'_>| input.conditioning.first_frame.is_some();
        if inputs.iter().any(|input| has_known_frame(input) != has_known_frame(first)) {
            let problem = "some samples of a batch have a known first frame and others do not";
            return Err(Error::Misuse(problem.into()));
        }
        let (tokens, tokens_per_frame) = (shape.grid.tokens(), shape.grid.tokens_per_frame());
        let (mut timesteps, mut groups) = (Vec::new(), Vec::new());
        for input in inputs {
            let mut denoised_tokens = tokens;
            if has_known_frame(input) {
                timesteps.push(Timestep(0.0));
                groups.push(tokens_per_frame);
                denoised_tokens -= tokens_per_frame;
            }
            timesteps.push(input.timestep);
            groups.push(denoised_tokens);
        }

        let contexts: Vec<Tensor> = inputs.iter().map(|input| input.conditioning.context.clone()).collect();
        if contexts[0].shape().len() != 2 || contexts[0].shape()[1] != config.text_dim {
            return Err(Error::shape("text embedding", format!("[L, {}]", config.text_dim), contexts[0].shape()));
        }
        let image_tokens = collect_image_tokens(inputs, config)?;
        Ok(Self {
            shape,
            tokens: shape.to_tokens(&latents, Order::ChannelFirst)?,
            timesteps,
            groups,
            context: concat_rows(&contexts)?,
            image_rows: image_tokens.as_ref().map_or(0, |t| t.shape()[0] / inputs.len()),
            image_tokens,
        })
    }
}

impl BatchShape {
    /// Cosines and sines of the rotary embedding of one sample, repeated for every sample.
    pub(super) fn rotary_tables(&self, head_dim: usize) -> Result<(Tensor, Tensor)> {
        let (cos, sin) = rotary_tables(&self.grid, head_dim)?;
        Ok((concat_rows(&vec![cos; self.samples])?, concat_rows(&vec![sin; self.samples])?))
    }

    /// Cuts `[B, C, T, H, W]` into tokens `[B * tokens, C * patch]`.
    pub(super) fn to_tokens(self, stack: &Tensor, order: Order) -> Result<Tensor> {
        let parts: Result<Vec<Tensor>> = stack.unstack()?.iter().map(|x| self.grid.to_tokens(x, order)).collect();
        concat_rows(&parts?)
    }

    /// Reassembles tokens `[B * tokens, C * patch]` to `[B, C, T, H, W]`.
    pub(super) fn to_latents(self, tokens: &Tensor, order: Order) -> Result<Tensor> {
        let by_sample = tokens.reshape([self.samples, self.grid.tokens(), tokens.shape()[1]])?;
        let latents: Result<Vec<Tensor>> =
            by_sample.unstack()?.iter().map(|x| self.grid.to_latents(x, order)).collect();
        Tensor::stack(&latents?)
    }
}

/// Concatenates matrices of the same shape along their rows.
fn concat_rows(parts: &[Tensor]) -> Result<Tensor> {
    let stack = Tensor::stack(parts)?;
    let [count, rows, columns] = *stack.shape() else {
        return Err(Error::shape("matrix", "[rows, columns]", parts[0].shape()));
    };
    stack.reshape([count * rows, columns])
}

/// The CLIP image tokens of all inputs; `None` if the model has no image branch.
fn collect_image_tokens(inputs: &[VelocityInput<'_>], config: &DitConfig) -> Result<Option<Tensor>> {
    if config.image_dim.is_none() {
        return Ok(None);
    }
    let tokens: Option<Vec<Tensor>> = inputs.iter().map(|input| input.conditioning.image_tokens.clone()).collect();
    let tokens = tokens.ok_or_else(|| {
        Error::Unsupported(
            "this model has a CLIP image branch: it needs the CLIP encoder among `model_paths` and an image".into(),
        )
    })?;
    concat_rows(&tokens).map(Some)
}

/// Appends the conditioning channels to the latents. Fails unless shapes and channels fit the model.
fn with_channels(config: &DitConfig, latents: &Tensor, conditioning: &Conditioning) -> Result<Tensor> {
    let [c, t, h, w] = *latents.shape() else {
        return Err(Error::shape("latents", "[C, T, H, W]", latents.shape()));
    };
    let extra_channels = conditioning.channels.as_ref().map_or(0, |extra| extra.shape()[0]);
    if c != config.out_channels || c + extra_channels != config.in_channels {
        return Err(Error::Shape {
            what: "latents with their conditioning channels".into(),
            expected: format!(
                "{} latent and {} conditioning channels",
                config.out_channels,
                config.in_channels.saturating_sub(config.out_channels)
            ),
            found: vec![c, extra_channels],
        });
    }
    let Some(extra) = &conditioning.channels else { return Ok(latents.clone()) };
    if extra.shape()[1..] != [t, h, w] {
        let expected = format!("[{extra_channels}, {t}, {h}, {w}]");
        return Err(Error::shape("conditioning channels", expected, extra.shape()));
    }
    let values = [latents.f32s()?, extra.f32s()?].concat();
    Tensor::new(values, [c + extra_channels, t, h, w])
}
