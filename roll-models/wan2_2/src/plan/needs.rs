//! Computes the plan of a run from its options, for `roll plan`.

use roll_core::{
    BuildContext, Error, Kind, Options, Result, nearest, parse_options,
    plan::{Needs, PlanInput},
};
use roll_network::hub::Hub;

use super::super::dit::Trainable;
use super::super::layout::{Layout, Machine};
use super::super::networks::Networks;
use super::super::options::{Placement, WanOptions};
use super::super::paths::ComponentFiles;
use super::super::tokenizer::PROMPT_TOKENS;
use super::super::vae::DEFAULT_CHECKPOINTS;
use super::{Plan, PublishedModel};

/// Estimates the memory and time of a run with these options. Only the headers of the model's files are read.
pub fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
    let options: WanOptions = parse_options(Kind::Model.section(), options)?;
    if !input.passes.texts.is_empty() {
        let problem = "the algorithm trains language models, and `wan2_2` makes videos: choose a model such as `causal_lm`, \
                       or an algorithm for videos such as `reward_fl`";
        return Err(Error::config("model.name", problem));
    }
    let networks = find_networks(&options, input.network.as_deref(), context)?;
    let has_dit2 = networks.experts > 1;
    // The plan reads no adapter.
    let with_adapter: [&str; 0] = [];
    let trained = options.trained_experts(has_dit2, &with_adapter)?;
    // The same parts are trained in all trained experts, so the first one represents them.
    let first_trained = trained.first().map_or("", String::as_str);
    let trainable = options.trainable(&trained, first_trained);
    let layout = Layout::of(&options, networks, Machine::planned(input))?;
    let mut plan = Plan::new(layout, input.clone(), trainable, trained, PROMPT_TOKENS)?;
    // The KL's reference is the adapter that training starts from, and the model keeps a copy.
    plan.keeps_initial_adapter = options.lora_checkpoint.is_some() && input.passes.reference_is_start;
    check_token_ranks(&plan)?;
    let [height, width] = plan.size();
    let (tokens, per_rank) = (plan.tokens(), plan.own_tokens());
    let parameters = plan.networks().experts * plan.networks().dit_elements();
    let sharded = if per_rank < tokens { format!(", {per_rank} of them on each rank") } else { String::new() };
    Ok(Needs {
        work: format!("{} frames of {width}x{height}, {tokens} tokens{sharded}", input.frames),
        facts: [("tokens".to_string(), tokens as f64), ("parameters".to_string(), parameters as f64)].into(),
        memory: plan.memory()?,
        time: plan.time(),
        hints: hints(&plan),
        ..Needs::default()
    })
}

/// The networks of the published model `network`, or of the model's files.
fn find_networks(options: &WanOptions, network: Option<&str>, context: &BuildContext) -> Result<Networks> {
    let names = || PublishedModel::ALL.iter().map(|n| n.name);
    if let Some(name) = network {
        let found = PublishedModel::ALL.iter().find(|n| n.name == name);
        return found.map(PublishedModel::networks).ok_or_else(|| Error::UnknownName {
            kind: "network",
            name: name.into(),
            nearest: nearest(name, names()).map(Into::into),
            known: names().collect::<Vec<_>>().join(", "),
        });
    }
    if options.model_paths.is_none() && options.model_id_with_origin_paths.is_none() {
        let known = names().collect::<Vec<_>>().join(", ");
        return Err(Error::config("model.model_paths", format!("name files, or a published model: --network {known}")));
    }
    let files = ComponentFiles::open(options, context, &Hub::from_env())?;
    Networks::of(&files, options)
}

/// Fails, as a run would, unless tokens and heads can be sharded between the ranks.
fn check_token_ranks(plan: &Plan) -> Result<()> {
    let found = plan.input.division.token_ranks.max(1);
    if plan.can_shard_tokens(found) {
        return Ok(());
    }
    let (tokens, heads, ranks) = (plan.tokens(), plan.networks().dit.heads, plan.input.ranks());
    let problem = format!(
        "expected a number that divides the {ranks} ranks of the job (`--devices`), the {tokens} tokens of a \
         video and the {heads} heads; with `strategy.stage: 3` only 1 or {ranks}; found {found}"
    );
    Err(Error::config("strategy.sequence_parallel_size", problem))
}

/// Settings that would save memory and are not set yet.
fn hints(plan: &Plan) -> Vec<String> {
    let mut hints = Vec::new();
    let mut hint = |applies: bool, text: &str| hints.extend(applies.then(|| text.to_string()));
    let is_resident = plan.layout.placement == Placement::Resident;
    let trains_all_weights = plan.trainable == Trainable::Full;
    let division = &plan.input.division;
    hint(is_resident && plan.input.ranks() > 1, "strategy.stage=3 shards the frozen weights between the ranks");
    hint(
        plan.layout.eight_bits.is_none() && plan.layout.placement != Placement::Sharded && !trains_all_weights,
        "model.weights_dtype=int8 rounds the matrices of the frozen blocks to eight bits",
    );
    hint(is_resident, "model.weight_store=host keeps the frozen weights in host memory, and prefetches a block");
    hint(is_resident, "model.weight_store=streamed streams the frozen weights from their files");
    let largest = plan.video.tiling.map_or(usize::MAX, |tiling| tiling.size[0].max(tiling.size[1]));
    // Smaller tiles save memory only if the decoder, and not a transformer block, sets the peak, with no more checkpoints
    // than it needs. Further checkpoints are kept only where memory is left.
    let decoder = plan.decoder_pullback(plan.video.checkpoints.least().min(DEFAULT_CHECKPOINTS));
    if let Some(smaller) = smaller_tiles(largest) {
        hint(decoder >= plan.block_pullback(), smaller);
    }
    hint(
        is_resident && plan.networks().experts > 1 && plan.layout.experts_on_device() > 1,
        "model.idle_expert=host keeps the weights of the expert that is not in use in host memory",
    );
    hint(plan.video.keep_attention, "model.keep_attention=false computes results of attention again in the pull");
    hint(
        !plan.layout.offload_inputs,
        "model.use_gradient_checkpointing_offload=true keeps block inputs in host memory",
    );
    let (ranks, shards_tokens) = (plan.input.ranks(), division.token_ranks > 1);
    // Algorithms that generate several videos for a sample (they decode without a gradient) divide these videos among the
    // ranks. They would gain nothing from ranks that share the tokens of one video.
    let [videos_without_gradient, _] = plan.input.passes.decoded();
    let would_save = !shards_tokens && videos_without_gradient == 0;
    if let Some(n) = (2..=ranks).find(|n| would_save && plan.can_shard_tokens(*n)) {
        hints.push(format!("strategy.sequence_parallel_size={n} shards the tokens of a video between {n} ranks"));
    }
    hints.push("fewer frames or pixels: data.num_frames, data.height and data.width".to_string());
    hints
}

/// The hint to take the next smaller tiles, if the tiles have sides of at most `largest` latent pixels. `None` if they
/// are the smallest already.
fn smaller_tiles(largest: usize) -> Option<&'static str> {
    match largest {
        35.. => Some("model.vae_tile_size=[34,34] and model.vae_tile_stride=[18,16] decode in tiles"),
        21..=34 => Some("model.vae_tile_size=[20,20] and model.vae_tile_stride=[12,12] decode in smaller tiles"),
        13..=20 => Some("model.vae_tile_size=[12,12] and model.vae_tile_stride=[8,8] decode in smaller tiles"),
        _ => None,
    }
}
