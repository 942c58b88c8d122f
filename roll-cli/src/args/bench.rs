//! Arguments of `roll bench`.

use std::path::PathBuf;

use burn_tensor::DType;
use clap::Args as ClapArgs;
use roll_backends::EightBits;
use roll_wan::Placement;

/// Arguments of `roll bench`.
#[derive(Debug, ClapArgs)]
pub struct Bench {
    /// Shapes of the networks and of the video: tiny, 1.3b, ti2v-5b, a14b (one expert), z-image.
    #[arg(long, default_value = "tiny", value_name = "NAME")]
    pub preset: String,
    /// Algorithm whose step is counted: reward_fl, diffusion_nft or flow_grpo.
    #[arg(long, default_value = "reward_fl", value_name = "NAME")]
    pub algo: String,
    /// Option of the algorithm, as `algo.trained_steps.leap.discount=0.3`; repeatable. Default: its default options.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
    /// Tensor backend and device: flex, libtorch, libtorch-cuda, cuda or wgpu; `:N` chooses device N.
    #[arg(long, default_value = "flex", value_name = "NAME")]
    pub backend: String,
    /// Dtype of weights and products, f32 or bf16. Default: the preset's.
    #[arg(long, value_name = "DTYPE", value_parser = f32_or_bf16)]
    pub dtype: Option<DType>,
    /// Eight-bit format of the matrices of the transformer's blocks, int8 or fp8, as with `model.weights_dtype`.
    #[arg(long, value_name = "FORMAT", value_parser = eight_bits)]
    pub weights_dtype: Option<EightBits>,
    /// Take products with fp8 weights in fp8, as with `model.products: fp8`.
    #[arg(long)]
    pub fp8_products: bool,
    /// Dtype of the VAE's decoder, f32 or bf16. Default: as in runs, bf16 on `libtorch-cuda`, else f32.
    #[arg(long, value_name = "DTYPE", value_parser = f32_or_bf16)]
    pub vae_dtype: Option<DType>,
    /// Caches that the decoder's pull keeps between chunks (`model.vae_checkpoints`). Default: all on GPUs, 4 on the
    /// CPU.
    #[arg(long, value_name = "N")]
    pub vae_checkpoints: Option<usize>,
    /// Number of transformer blocks. Default: the preset's.
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Frames of the video; the preset's unless given.
    #[arg(long, value_name = "N")]
    pub frames: Option<usize>,
    /// Height and width of the video, 480x832; the preset's unless given.
    #[arg(long, value_name = "HxW", value_parser = height_and_width)]
    pub size: Option<[usize; 2]>,
    /// Measurements of each phase, after one to warm up; the median is reported.
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub rounds: usize,
    /// Keep block inputs in host memory between forward and pull.
    #[arg(long)]
    pub offload: bool,
    /// Keep results of self-attention between forward and pull, as with `model.keep_attention`.
    #[arg(long)]
    pub keep_attention: bool,
    /// Where the transformer's weights wait, as with `model.weight_store`: on the device (resident), in host memory
    /// (host), or in a file (streamed: a temporary one, which takes their size on disk). The last two bring them a block
    /// ahead.
    #[arg(long, value_name = "STORE", default_value = "resident", value_parser = store)]
    pub weight_store: Placement,
    /// Count two velocities for each denoising step, the second without gradient, as with `algo.guidance_scale` above
    /// 1.
    #[arg(long)]
    pub guided: bool,
    /// Leave out encoding, decoding and their pulls, which take most of the time of small transformers.
    #[arg(long)]
    pub without_vae: bool,
    /// Make whole steps, as training does: record all passes before the first pull. Times and memory are then those of
    /// training.
    #[arg(long)]
    pub whole_step: bool,
    /// Write the result as JSON too, after each phase and at the end; `-` prints it instead of the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Replace an existing file of `--json`.
    #[arg(long, requires = "json")]
    pub force: bool,
}

fn store(text: &str) -> Result<Placement, String> {
    match text {
        "resident" => Ok(Placement::Resident),
        "host" => Ok(Placement::Host),
        "streamed" => Ok(Placement::Streamed),
        _ => Err("expected resident, host or streamed".into()),
    }
}

fn eight_bits(text: &str) -> Result<EightBits, String> {
    match text {
        "int8" => Ok(EightBits::Int8),
        "fp8" => Ok(EightBits::E4m3),
        _ => Err("expected int8 or fp8".into()),
    }
}

fn f32_or_bf16(text: &str) -> Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        _ => Err("expected f32 or bf16".into()),
    }
}

fn height_and_width(text: &str) -> Result<[usize; 2], String> {
    let parts: Vec<usize> = text.split('x').filter_map(|n| n.parse().ok()).collect();
    match *parts {
        [h, w] if h > 0 && w > 0 => Ok([h, w]),
        _ => Err("expected HEIGHTxWIDTH, for instance 480x832".into()),
    }
}
