//! Computes the plan of a run from its options, for `roll plan`.

use roll_core::{
    BuildContext, Error, Kind, Options, Result, nearest, parse_options,
    plan::{Needs, PlanInput},
};
use roll_network::hub::Hub;
use roll_network::precision::WeightsDType;

use super::super::components;
use super::super::dit::Trainable;
use super::super::options::{Checkpoints, IdleExpert, Placement, TileSize, WanOptions};
use super::super::paths::ComponentFiles;
use super::super::recorded_memory::RecordedMemory;
use super::super::tokenizer::PROMPT_TOKENS;
use super::super::vae::{DEFAULT_CHECKPOINTS, VaeConfig};
use super::{DeviceStorage, Networks, Plan, PublishedModel, vae_budget};

/// Estimates the memory and time of a run with these options. Only the headers of the model's files are read.
pub fn needs(options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
    let options: WanOptions = parse_options(Kind::Model.section(), options)?;
    if !input.passes.texts.is_empty() {
        let problem = "the algorithm trains language models, and `wan2_2` makes videos: choose a model such as `causal_lm`, \
                       or an algorithm for videos such as `reward_fl`";
        return Err(Error::config("model.name", problem));
    }
    let networks = find_networks(&options, input.network.as_deref(), context)?;
    // `&[]`: the experts that adapter files are for. The plan reads no adapter.
    let trained = options.trained_experts(networks.experts > 1, &[])?;
    // What is trained is the same in all trained experts: the first represents them.
    let first_trained = trained.first().map_or("", String::as_str);
    let mut plan = Plan {
        placement: options.weight_store.or(input.division.placement),
        trainable: options.trainable(&trained, first_trained),
        // The KL's reference is the adapter that training starts from, and the model keeps a copy.
        keeps_start: options.lora_checkpoint.is_some() && input.passes.reference_is_start,
        trained_experts: trained.clone(),
        tiling: options.tiling()?,
        checkpoints: DEFAULT_CHECKPOINTS,
        offload_inputs: options.use_gradient_checkpointing_offload,
        passes_on_device: 0,
        keep_attention: options.keep_attention.without_memory(),
        text_len: PROMPT_TOKENS,
        storage: storage(&options, &networks, input)?,
        input: input.clone(),
        networks,
    };
    // As in a run, automatic tiles and checkpoints of the decoder depend on the memory beside the resident weights: those
    // of the experts on the device, and those of the VAE, in f32.
    if let Some(memory) = input.memory {
        let experts = match plan.resolved_placement() {
            Placement::Auto | Placement::Resident => plan.experts_on_device(),
            Placement::Streamed | Placement::Host | Placement::Sharded => 0,
        };
        let resident_bytes = experts * plan.expert_bytes() + 4 * plan.networks.vae_elements();
        let networks = &plan.networks;
        let bytes = [plan.storage.block_input_bytes, plan.storage.decoder_element_bytes];
        let budget = vae_budget(memory, resident_bytes, &networks.dit, bytes, &options);
        if let TileSize::Auto = options.vae_tile_size {
            plan.tiling = budget.tiling(&networks.vae, plan.latent_size());
        }
        let recorded = RecordedMemory {
            memory,
            resident: resident_bytes,
            trained: plan.trained_elements()?,
            passes: Some(input.passes.held()),
            token_ranks: input.division.token_ranks,
            element: plan.storage.block_input_bytes,
            decoder_element: plan.storage.decoder_element_bytes,
            keep_attention: options.recomputed_attention(),
            offload: plan.offload_inputs,
        };
        let kept = recorded.kept(&plan.networks.dit, &plan.networks.vae, plan.tiling, plan.latent_size());
        (plan.keep_attention, plan.passes_on_device) = (kept.attention, kept.passes);
        let budget = recorded.beside(budget, kept, &plan.networks.dit);
        let [chunks, ..] = plan.latent_size();
        plan.checkpoints = match options.vae_checkpoints {
            // Those in host memory: what is free there is known to the run alone.
            _ if plan.offload_inputs => DEFAULT_CHECKPOINTS,
            Checkpoints::Auto => budget.checkpoints(&plan.networks.vae, plan.tiling, plan.latent_size()),
            Checkpoints::Of(count) => count.min(chunks.saturating_sub(1)),
        };
    }
    check_token_ranks(&plan)?;
    let [height, width] = plan.size();
    let (tokens, per_rank) = (plan.tokens(), plan.own_tokens());
    let parameters = plan.networks.experts * plan.networks.dit_elements();
    let sharded = if per_rank < tokens { format!(", {per_rank} of them on each rank") } else { String::new() };
    Ok(Needs {
        work: format!("{} frames of {width}x{height}, {tokens} tokens{sharded}", input.frames),
        facts: [("tokens".to_string(), tokens as f64), ("parameters".to_string(), parameters as f64)].into(),
        memory: plan.memory()?,
        time: plan.time(),
        hints: hints(&plan),
    })
}

/// The networks of the published model `network`, or of the model's files.
fn find_networks(options: &WanOptions, network: Option<&str>, context: &BuildContext) -> Result<Networks> {
    let known = || PublishedModel::ALL.iter().map(|n| n.name);
    if let Some(name) = network {
        let found = PublishedModel::ALL.iter().find(|n| n.name == name);
        return found.map(PublishedModel::networks).ok_or_else(|| Error::UnknownName {
            kind: "network",
            name: name.into(),
            nearest: nearest(name, known()).map(Into::into),
            known: known().collect::<Vec<_>>().join(", "),
        });
    }
    if options.model_paths.is_none() && options.model_id_with_origin_paths.is_none() {
        let known = known().collect::<Vec<_>>().join(", ");
        return Err(Error::config("model.model_paths", format!("name files, or a published model: --network {known}")));
    }
    let files = ComponentFiles::open(options, context, &Hub::from_env())?;
    Ok(Networks {
        dit: components::dit_config(&files.dit, options.num_heads)?,
        experts: 1 + usize::from(files.dit2.is_some()),
        stored: components::dit_dtype(&files.dit),
        eight_bits: components::eight_bits(&files.dit),
        vae: VaeConfig::from_shapes(&files.vae.shapes())?,
    })
}

/// The storage that [`super::super::loading::open`] chooses. Fails if products in fp8 lack fp8 weights. A GPU is assumed to have bf16, and to be libtorch's.
fn storage(options: &WanOptions, networks: &Networks, input: &PlanInput) -> Result<DeviceStorage> {
    let gpu = input.memory.is_some();
    let weights = options.weights_dtype.on(networks.stored, gpu);
    let weight_bytes = weights.size();
    let quantised = options.weights_dtype.eight_bits();
    let sharded = options.weight_store.or(input.division.placement) == Placement::Sharded;
    // Eight-bit weights of a file stay as they are, unless they are sharded, which decodes them.
    let in_file = networks.eight_bits.filter(|_| options.weights_dtype == WeightsDType::Auto && !sharded);
    let format = quantised.or(in_file);
    options.products.check_weights(format)?;
    let eight_bits = format.is_some();
    let idle = match networks.experts > 1 {
        true => {
            let all = networks.experts * super::weight_bytes(networks.dit.weights(), weight_bytes, eight_bits);
            let converted = options.base_lora.is_some() || networks.stored != weights || quantised.is_some();
            options.idle_expert.chosen(all, gpu, input.memory, converted)
        }
        false => IdleExpert::Keep,
    };
    Ok(DeviceStorage {
        weight_bytes,
        eight_bits,
        block_input_bytes: options.compute_dtype.on(weights, gpu).size(),
        decoder_element_bytes: options.vae_dtype.on(gpu).size(),
        idle,
    })
}

/// Fails, as a run would, unless tokens and heads can be sharded between the ranks.
fn check_token_ranks(plan: &Plan) -> Result<()> {
    let found = plan.input.division.token_ranks.max(1);
    match plan.can_shard_tokens(found) {
        true => Ok(()),
        false => {
            let (tokens, heads, ranks) = (plan.tokens(), plan.networks.dit.heads, plan.input.ranks());
            let problem = format!(
                "expected a number that divides the {ranks} ranks of the job (`--devices`), the {tokens} tokens of a \
                 video and the {heads} heads; with `strategy.stage: 3` only 1 or {ranks}; found {found}"
            );
            Err(Error::config("strategy.sequence_parallel_size", problem))
        }
    }
}

/// Settings that would save memory and are not set yet.
fn hints(plan: &Plan) -> Vec<String> {
    let mut hints = Vec::new();
    let mut hint = |applies: bool, text: &str| hints.extend(applies.then(|| text.to_string()));
    let (resident, full) = (plan.resolved_placement() == Placement::Resident, plan.trainable == Trainable::Full);
    let division = &plan.input.division;
    hint(resident && plan.input.ranks() > 1, "strategy.stage=3 shards the frozen weights between the ranks");
    hint(
        !plan.storage.eight_bits && plan.resolved_placement() != Placement::Sharded && !full,
        "model.weights_dtype=int8 rounds the matrices of the frozen blocks to eight bits",
    );
    hint(resident, "model.weight_store=host keeps the frozen weights in host memory, and prefetches a block");
    hint(resident, "model.weight_store=streamed streams the frozen weights from their files");
    let largest = plan.tiling.map_or(usize::MAX, |tiling| tiling.size[0].max(tiling.size[1]));
    let smaller = match largest {
        35.. => "model.vae_tile_size=[34,34] and model.vae_tile_stride=[18,16] decode in tiles",
        21..=34 => "model.vae_tile_size=[20,20] and model.vae_tile_stride=[12,12] decode in smaller tiles",
        _ => "model.vae_tile_size=[12,12] and model.vae_tile_stride=[8,8] decode in smaller tiles",
    };
    // Smaller tiles save memory only if the decoder, and not a transformer block, sets the peak, with no more checkpoints
    // than it needs: others are kept only where memory is left.
    let decoder = plan.decoder_pullback(plan.checkpoints.min(DEFAULT_CHECKPOINTS));
    hint(largest > 12 && decoder >= plan.block_pullback(), smaller);
    hint(
        resident && plan.networks.experts > 1 && plan.experts_on_device() > 1,
        "model.idle_expert=host keeps the weights of the expert that is not in use in host memory",
    );
    hint(plan.keep_attention, "model.keep_attention=false computes results of attention again in the pull");
    hint(!plan.offload_inputs, "model.use_gradient_checkpointing_offload=true keeps block inputs in host memory");
    let (ranks, shards_tokens) = (plan.input.ranks(), division.token_ranks > 1);
    // Algorithms that generate several videos for a sample (they decode without a gradient) divide these videos among the
    // ranks. They would gain nothing from ranks that share the tokens of one video.
    let [videos_without_gradient, _] = plan.input.passes.decoded();
    let is_useful = !shards_tokens && videos_without_gradient == 0;
    if let Some(n) = (2..=ranks).find(|n| is_useful && plan.can_shard_tokens(*n)) {
        hint(true, &format!("strategy.sequence_parallel_size={n} shards the tokens of a video between {n} ranks"));
    }
    hint(true, "fewer frames or pixels: data.num_frames, data.height and data.width");
    hints
}
