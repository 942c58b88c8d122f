//! Options of the policy loss, named as in the reference implementation.

use roll_core::keys::check_ranges;
use roll_core::{Error, Result};

use crate::agentic_ppo::aggregate::Aggregation;
use crate::agentic_ppo::correction::CorrectionConfig;

/// The unit of text that has one ratio of new to old probability.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RatioType {
    /// Each token.
    #[default]
    Token,
    /// Each turn of the agent: the geometric mean of the ratios of its tokens (GSPO by segments,
    /// <https://arxiv.org/abs/2507.18071>).
    Segment,
}

/// The form of the policy gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PgVariant {
    /// `-log p A`.
    Vanilla,
    /// Clipped surrogate (<https://arxiv.org/abs/1707.06347>).
    #[default]
    Ppo,
    /// Truncated importance sampling: `-clamp(ratio) A log p`, with the ratio as a constant, clamped to
    /// [tis_lower_bound, tis_upper_bound].
    Tis,
    /// Tapered off-policy REINFORCE (<https://arxiv.org/abs/2503.14286>): `vanilla` for episodes with a positive score;
    /// for other episodes weighted by the ratio, which is truncated at 1.
    Topr,
    /// CISPO, clipped importance weights (<https://arxiv.org/abs/2506.13585>): the formula of `tis`, with the ratio
    /// clamped around 1, to [1 - cispo_epsilon_low, 1 + cispo_epsilon_high].
    Cispo,
    /// Kimi k1.5 (<https://arxiv.org/abs/2501.12599>): `vanilla` plus the squared log-ratio as a penalty.
    Kimi15,
}

/// Options of the policy loss.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LossConfig {
    /// Unit of text that has one ratio.
    pub ratio_type: RatioType,
    /// The form of the policy gradient.
    pub pg_variant: PgVariant,
    /// `ppo`: the ratio is clipped to [1 - pg_clip, 1 + pg_clip].
    #[schemars(range(min = 0))]
    pub pg_clip: f64,
    /// Whether the ratio is clipped to [1 - pg_clip_low, 1 + pg_clip_high] instead.
    pub use_pg_clip_range: bool,
    /// Distance of the lower clip from 1, with `use_pg_clip_range`.
    #[schemars(range(min = 0))]
    pub pg_clip_low: f64,
    /// Distance of the upper clip from 1, with `use_pg_clip_range`.
    #[schemars(range(min = 0))]
    pub pg_clip_high: f64,
    /// Whether the loss of bad actions is bounded too (<https://arxiv.org/abs/1912.09729>).
    pub dual_clip_loss: bool,
    /// Bound of `dual_clip_loss`, as a multiple of the advantage's magnitude. `null`: 1 + 2 pg_clip, as in the
    /// reference implementation.
    #[schemars(extend("exclusiveMinimum" = 1))]
    pub dual_clip: Option<f64>,
    /// Whether the KL to the reference policy is part of the loss.
    pub use_kl_loss: bool,
    /// Coefficient of the KL in the loss.
    #[schemars(range(min = 0))]
    pub kl_loss_coef: f64,
    /// Coefficient of the entropy bonus.
    pub entropy_loss_coef: f64,
    /// Reduction of the losses of tokens to one number.
    pub loss_agg_mode: Aggregation,
    /// Correction for inference with other kernels.
    pub train_infer_correction: CorrectionConfig,
    /// `tis`: smallest ratio.
    pub tis_lower_bound: f64,
    /// `tis`: largest ratio.
    pub tis_upper_bound: f64,
    /// `topr`: weight of episodes with a positive score.
    pub topr_positive_weight: f64,
    /// `topr`: weight of all other episodes.
    pub topr_negative_weight: f64,
    /// `cispo`: distance of the lower clip from 1.
    #[schemars(range(min = 0))]
    pub cispo_epsilon_low: f64,
    /// `cispo`: distance of the upper clip from 1.
    #[schemars(range(min = 0))]
    pub cispo_epsilon_high: f64,
    /// `cispo`: whether tokens that PPO would clip are left out.
    pub cispo_use_unified_mask: bool,
    /// `kimi15`: weight of the squared log-ratio.
    #[schemars(range(min = 0))]
    pub kimi15_tau: f64,
    /// Whether fractions and means in metrics include prompts and padding, for comparing curves with those of a run of
    /// ROLL, which counts them.
    pub reference_metrics: bool,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            ratio_type: RatioType::Token,
            pg_variant: PgVariant::Ppo,
            pg_clip: 0.2,
            use_pg_clip_range: false,
            pg_clip_low: 0.2,
            pg_clip_high: 0.2,
            dual_clip_loss: false,
            dual_clip: None,
            use_kl_loss: false,
            kl_loss_coef: 0.0,
            entropy_loss_coef: 0.0,
            loss_agg_mode: Aggregation::SeqMeanTokenMean,
            train_infer_correction: CorrectionConfig::default(),
            tis_lower_bound: 0.0,
            tis_upper_bound: 1.0,
            topr_positive_weight: 1.0,
            topr_negative_weight: 1.0,
            cispo_epsilon_low: 0.1,
            cispo_epsilon_high: 0.1,
            cispo_use_unified_mask: false,
            kimi15_tau: 0.1,
            reference_metrics: false,
        }
    }
}

impl LossConfig {
    /// The smallest and the largest ratio of [`PgVariant::Ppo`].
    pub fn clip_range(&self) -> (f64, f64) {
        if self.use_pg_clip_range {
            (1.0 - self.pg_clip_low, 1.0 + self.pg_clip_high)
        } else {
            (1.0 - self.pg_clip, 1.0 + self.pg_clip)
        }
    }

    /// The bound of the dual clip; `None` if it is off.
    pub fn dual_bound(&self) -> Option<f64> {
        self.dual_clip_loss.then(|| self.dual_clip.unwrap_or(1.0 + 2.0 * self.pg_clip))
    }

    /// Whether the loss needs entropies.
    pub fn needs_entropy(&self) -> bool {
        self.entropy_loss_coef != 0.0
    }

    /// Fails on values out of range.
    pub fn check(&self) -> Result<()> {
        check_ranges("algo", self)?;
        if self.tis_lower_bound.is_nan() || self.tis_lower_bound > self.tis_upper_bound {
            let problem = format!("{} is above tis_upper_bound {}", self.tis_lower_bound, self.tis_upper_bound);
            return Err(Error::config("algo.tis_lower_bound", problem));
        }
        self.train_infer_correction.check()
    }
}
