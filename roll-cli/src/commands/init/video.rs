//! Questions about video models, their clips, their reward, and the videos that show the progress.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::serde_json::{Value as Json, json};
use roll_core::{ConditionInput, Error, Kind, Result, VideoUnit};
use roll_media::{Sizing, probe, read_image, target_size};
use roll_network::hub::Hub;
use roll_video::rows::{DataConfig, Metadata};
use roll_wan::paths::ComponentFiles;

use super::answers::{Answers, Question};
use super::{Interview, Place, context, open_model};

/// Number of parameters above which a model counts as a published one, and not as a toy. A published model makes videos
/// in few steps only if it is distilled.
const MIN_PUBLISHED_PARAMETERS: f64 = 1e9;
/// At most this many clips are probed for their size and length.
const MAX_PROBED: usize = 500;
/// `[height, width]` that is proposed for prompts without clips. Sizes with more pixels are not proposed.
const PROPOSED_SIZE: [usize; 2] = [480, 832];
/// The most frames that are proposed: five seconds of Wan.
const MAX_FRAMES: usize = 81;
/// At most this many clips are proposed for an evaluation.
const MAX_EVALUATED: u64 = 8;
/// Videos in a step of Reward-FL, over all ranks.
const VIDEOS_PER_STEP: usize = 8;
/// Rank of the trained LoRA of a published model.
const LORA_RANK: u64 = 32;
/// The option of [`open_model`] if only the answers so far count.
const NO_FURTHER_OPTION: Option<(&str, &Json)> = None;

/// Facts of the model from the headers of its files.
struct ModelFacts {
    /// Number of parameters of all experts.
    parameters: f64,
    experts: usize,
    has_tokenizer: bool,
    has_text_encoder: bool,
}

/// Facts of the rows of the data.
#[derive(Default)]
struct DataFacts {
    /// Height and width of most clips; `None` without clips.
    size: Option<[usize; 2]>,
    /// Median number of frames; 0 without clips.
    frames: usize,
    all_have_clips: bool,
    all_have_pictures: bool,
}

impl Interview<'_, '_> {
    /// Asks for a video model, its data and its reward. Returns the number of trained parameters; `None` for the demo.
    pub(super) fn ask_video_model(&mut self, algorithm: &str, place: &Place) -> Result<Option<usize>> {
        let Some(files) = self.ask_model_files()? else { return Ok(None) };
        let unit = self.ask_tokenizer(&files)?;
        let trains_on_clips = algorithm == "flow_matching";
        if files.parameters > MIN_PUBLISHED_PARAMETERS {
            self.set_published(algorithm, &files, place)?;
        }
        let data = self.ask_data(trains_on_clips, unit)?;
        if !trains_on_clips {
            self.ask_reward(algorithm, &data)?;
        }
        self.ask_evaluated_clips()?;
        self.ask_sample_prompts(unit)?;
        if algorithm == "reward_fl" {
            self.answers
                .put("training.gradient_accumulation_steps", (VIDEOS_PER_STEP / place.devices.max(1)).max(1))?;
        }
        let model = open_model(self.registry, self.answers, NO_FURTHER_OPTION)?;
        Ok(Some(model.parameter_count()))
    }

    /// Asks for the files of the model. `None` without an answer, which means the demo.
    fn ask_model_files(&mut self) -> Result<Option<ModelFacts>> {
        const HUB: &str = "model.model_id_with_origin_paths";
        let (key, asks) = match self.answers.is_given(HUB) {
            true => (HUB, "Published files"),
            false => ("model.model_paths", "JSON list of the model's files, or its directory"),
        };
        let mut found = None;
        let question = Question::optional(key, asks, "the demo's small model and its data");
        self.answers.ask(&question, |answers, text| {
            let (path, ids) = if key == HUB { (None, Some(text)) } else { (Some(Path::new(text)), None) };
            let files = ComponentFiles::resolve(path, ids, &Hub::of(&context()))?;
            let count = |shapes: BTreeMap<String, Vec<usize>>| -> f64 {
                shapes.values().map(|shape| shape.iter().map(|n| *n as f64).product::<f64>()).sum()
            };
            found = Some(ModelFacts {
                parameters: files.experts().map(|(_, file)| count(file.shapes())).sum(),
                experts: files.experts().count(),
                has_tokenizer: files.tokenizer.is_some(),
                has_text_encoder: files.text_encoder.is_some(),
            });
            answers.parse(key, text)
        })?;
        Ok(found)
    }

    /// Asks for the tokenizer, unless it lies beside the weights or the model has no text encoder. Opens the model, and
    /// returns the unit of which heights and widths must be multiples.
    fn ask_tokenizer(&mut self, files: &ModelFacts) -> Result<VideoUnit> {
        const KEY: &str = "model.tokenizer_path";
        let registry = self.registry;
        let mut unit = VideoUnit::default();
        let mut open_with = |answers: &Answers, value: &Json| -> Result<()> {
            let mut model = open_model(registry, answers, Some(("tokenizer_path", value)))?;
            unit = model.as_diffusion().map(|model| model.video_unit()).unwrap_or_default();
            Ok(())
        };
        if files.has_tokenizer || !files.has_text_encoder {
            open_with(self.answers, &Json::Null)?;
            return Ok(unit);
        }
        // As the repository of Wan has it.
        let usual = Path::new("google/umt5-xxl");
        let beside_weights =
            Path::new(self.answers.text("model.model_paths")).parent().map(|folder| folder.join(usual));
        let proposed = beside_weights.filter(|path| path.is_dir()).unwrap_or_else(|| usual.into());
        self.answers.ask(&Question::new(KEY, "Directory of its tokenizer", proposed.display()), |answers, text| {
            let value = answers.parse(KEY, text)?;
            open_with(answers, &value)?;
            Ok(value)
        })?;
        Ok(unit)
    }

    /// Sets options of a published model: a LoRA by which it makes videos in four steps, and options that save GPU
    /// memory.
    fn set_published(&mut self, algorithm: &str, files: &ModelFacts, place: &Place) -> Result<()> {
        const KEY: &str = "model.base_lora";
        let registry = self.registry;
        if algorithm != "flow_matching" {
            let asks = match files.experts {
                1 => "LoRA that makes videos in four steps, such as Lightning's",
                _ => "LoRA that makes videos in four steps, such as Lightning's: HIGH.safetensors,LOW.safetensors",
            };
            let question = Question::optional(KEY, asks, "the files are distilled themselves");
            let is_merged = self.answers.ask(&question, |answers, text| {
                let value = match text.split_once(',') {
                    Some((high, low)) if files.experts > 1 => json!({"dit": high.trim(), "dit2": low.trim()}),
                    _ => answers.parse(KEY, text)?,
                };
                open_model(registry, answers, Some(("base_lora", &value)))?;
                Ok(value)
            })?;
            if is_merged {
                self.set_four_steps(algorithm, files)?;
            }
        }
        if place.devices > 0 {
            self.answers.put("model.use_gradient_checkpointing_offload", true)?;
            self.answers.put("model.weights_dtype", "int8")?;
        }
        self.answers.put("model.lora_rank", LORA_RANK)
    }

    /// Sets the four timesteps that a LoRA such as Lightning's was distilled for, and the options of algorithms that go
    /// with them.
    fn set_four_steps(&mut self, algorithm: &str, files: &ModelFacts) -> Result<()> {
        self.answers.put("algo.timesteps", json!([1000, 750, 500, 250]))?;
        if algorithm == "reward_fl" {
            self.answers.put("algo.trained_steps", json!({"leap": {"discount": 0.3}}))?;
            self.answers.put("algo.mid_timestep", 0)?;
            self.answers.put("algo.final_timestep", 3)?;
        } else {
            self.answers.put("algo.shift", 5)?;
        }
        if files.experts > 1 {
            self.answers.put("model.trainable_models", "dit,dit2")?;
        }
        Ok(())
    }

    /// Asks for the data. Then asks for size and length of the videos, and proposes those of the data.
    fn ask_data(&mut self, trains_on_clips: bool, unit: VideoUnit) -> Result<DataFacts> {
        let mut data = DataFacts::default();
        let question =
            Question::new("data.metadata", "Table or directory of clips, or text file of prompts", "data.csv");
        self.answers.ask(&question, |answers, text| {
            data = look(text, trains_on_clips)?;
            answers.parse("data.metadata", text)
        })?;
        let size = data
            .size
            .and_then(|size| target_size(size, PROPOSED_SIZE[0] * PROPOSED_SIZE[1], [unit.height, unit.width]).ok());
        let [height, width] = size.unwrap_or(PROPOSED_SIZE);
        let frames = unit.frames_within(if data.frames > 0 { data.frames.min(MAX_FRAMES) } else { MAX_FRAMES });
        let sides = [
            ("data.height", "Height of the videos in pixels", height, unit.height),
            ("data.width", "Width of the videos in pixels", width, unit.width),
        ];
        for (key, asks, proposed, multiple) in sides {
            self.answers.ask(&Question::new(key, asks, proposed), |answers, text| {
                let value = answers.parse(key, text)?;
                match value.as_u64() {
                    Some(side) if side.is_multiple_of(multiple as u64) => Ok(value),
                    _ => Err(Error::config(key, format!("expected a multiple of {multiple}, found {text}"))),
                }
            })?;
        }
        if unit.most_frames != Some(1) {
            self.ask_value("data.num_frames", "Frames of a video", frames)?;
        }
        Ok(data)
    }

    /// Asks for a reward that the algorithm and the data allow.
    fn ask_reward(&mut self, algorithm: &str, data: &DataFacts) -> Result<()> {
        let needs_gradient = algorithm == "reward_fl";
        let mut reads_reference = false;
        let default = if data.all_have_clips || data.all_have_pictures { "insightface" } else { "motion" };
        self.ask_component(Kind::Reward, default, |registry, name, options, context| {
            let reward = registry.reward(name, options, context)?;
            if needs_gradient && !reward.differentiable() {
                let problem = format!(
                    "the reward `{name}` has no gradient, which `reward_fl` needs: choose another, or start again with \
                     `diffusion_nft`, which takes any"
                );
                return Err(Error::config("reward.name", problem));
            }
            reads_reference = reward.reads_reference();
            if reads_reference && !data.all_have_clips && !data.all_have_pictures {
                let problem = format!(
                    "the reward `{name}` compares with a clip or a picture, and rows of `data.metadata` have none: \
                     choose another"
                );
                return Err(Error::config("reward.name", problem));
            }
            Ok(())
        })?;
        if reads_reference && !data.all_have_clips {
            self.answers.put("algo.reference", "image")?;
        }
        Ok(())
    }

    /// Asks for clips that measure the progress.
    fn ask_evaluated_clips(&mut self) -> Result<()> {
        const KEY: &str = "evaluation.metadata";
        let trains_on_clips = self.answers.text("algo.name") == "flow_matching";
        let mut rows = 0;
        let question =
            Question::optional(KEY, "Clips or prompts that are not trained on, to measure progress", "no measurement");
        self.answers.ask(&question, |answers, text| {
            look(text, trains_on_clips)?;
            rows = Metadata::open(&data_config(text))?.rows.len();
            answers.parse(KEY, text)
        })?;
        if rows as u64 > MAX_EVALUATED {
            self.answers.put("evaluation.samples", MAX_EVALUATED)?;
        }
        Ok(())
    }

    /// Asks for prompts whose videos show the progress, and for a picture if the model needs one. `unit` says which
    /// numbers of frames the model takes.
    fn ask_sample_prompts(&mut self, unit: VideoUnit) -> Result<()> {
        const KEY: &str = "evaluation.prompts";
        let size = ["data.height", "data.width"].map(|key| self.answers.get(key).and_then(Json::as_u64).unwrap_or(0));
        let size = size.map(|side| side as usize);
        let frames = self.answers.get("data.num_frames").and_then(Json::as_u64).unwrap_or(1) as usize;
        let mut model = open_model(self.registry, self.answers, NO_FURTHER_OPTION)?;
        // Fails if the model cannot make a video of the prompt, for want of a picture or because of the picture.
        let mut check_input = |prompt: &str, picture: Option<&str>| -> Result<()> {
            let image = picture.map(|path| read_image(path, Sizing::Exact(size))).transpose()?;
            let frames = unit.frames_within(frames);
            let input = ConditionInput { prompt: prompt.into(), image, end_image: None, frames, size };
            model.as_diffusion().map_or(Ok(()), |model| model.check_input(&input))
        };
        let question = Question::optional(
            KEY,
            "A prompt whose video shows the progress, or a text file with one a line",
            "no videos of prompts",
        );
        let mut needs_picture = false;
        self.answers.ask(&question, |answers, text| {
            if text.starts_with('[') {
                return answers.parse(KEY, text);
            }
            let texts = match Path::new(text).is_file() {
                true => Metadata::open(&data_config(text))?.rows.into_iter().map(|row| row.prompt).collect(),
                false => vec![text.to_string()],
            };
            let without_picture = None;
            needs_picture = texts.iter().any(|text| check_input(text, without_picture).is_err());
            Ok(Json::from(texts))
        })?;
        if needs_picture {
            let question = Question::new("evaluation.prompts.0.image", "Picture that these videos begin with", "");
            let picture = self.answers.ask_without_setting(&question, |_, text| {
                check_input("", Some(text))?;
                Ok(text.to_string())
            })?;
            let texts = self.answers.get(KEY).and_then(Json::as_array).cloned().unwrap_or_default();
            let with_picture = |text: &Json| json!({"prompt": text, "image": picture});
            let all: Vec<Json> = texts.iter().map(with_picture).collect();
            self.answers.put(KEY, all)?;
        }
        Ok(())
    }
}

/// The configuration of the data in `path`, with defaults.
fn data_config(path: &str) -> DataConfig {
    DataConfig { metadata: Some(path.into()), ..DataConfig::default() }
}

/// Reads the rows of a table, directory or file of prompts, and the headers of its clips. Prints the number of rows,
/// and the usual size and length of the clips.
fn look(path: &str, trains_on_clips: bool) -> Result<DataFacts> {
    let config = data_config(path);
    let metadata = Metadata::open(&config)?;
    let rows = metadata.rows.len();
    let with_clip = metadata.rows.iter().filter(|row| row.video.is_some()).count();
    if trains_on_clips && with_clip < rows {
        let problem = format!("`flow_matching` trains on clips, and {} of {rows} rows have none", rows - with_clip);
        return Err(Error::bad_file(path, problem));
    }
    let mut data = DataFacts {
        all_have_clips: with_clip == rows,
        all_have_pictures: metadata.rows.iter().all(|row| row.image.is_some()),
        ..DataFacts::default()
    };
    let probed = metadata.probe_clips(config.decoder, MAX_PROBED);
    // If no clip can be read, the error of the first one says why.
    if probed.is_empty()
        && let Some(first) = metadata.rows.iter().find_map(|row| row.video.as_ref())
    {
        probe(first, config.decoder)?;
    }
    let mut sizes = BTreeMap::<[usize; 2], usize>::new();
    probed.iter().for_each(|(_, clip)| *sizes.entry(clip.size).or_default() += 1);
    data.size = sizes.into_iter().max_by_key(|(_, count)| *count).map(|(size, _)| size);
    let mut lengths: Vec<usize> = probed.iter().map(|(_, clip)| clip.frames).collect();
    lengths.sort_unstable();
    data.frames = lengths.get(lengths.len() / 2).copied().unwrap_or_default();
    match data.size {
        Some([height, width]) => {
            println!(
                "  {rows} rows; most clips have {width}x{height} pixels, half of them {} frames or more",
                data.frames
            );
        }
        None => println!("  {rows} prompts"),
    }
    Ok(data)
}
