use roll_plugin::serde::{Deserialize, Serialize};
use roll_plugin::{Grad, Pullback, Result, RewardScorer, Score, Target, Tensor, Video};

/// Minus the mean of `|x - level|^2`. The fields are the options of the reward in the configuration.
#[derive(Default, Serialize, Deserialize)]
#[serde(crate = "roll_plugin::serde", default)]
struct MyReward {
    level: f32,
}

roll_plugin::export_reward!("my_reward", "Nearness of every value to a level", MyReward);

impl RewardScorer for MyReward {
    fn name(&self) -> &str {
        "my_reward"
    }
    fn differentiable(&self) -> bool {
        true
    }
    fn reads_reference(&self) -> bool {
        false
    }
    fn score(&mut self, video: &Video, _: &str, _: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let (x, level) = (video.frames().clone(), self.level); // f32 [T, 3, H, W] in [-1, 1]
        let n = x.len() as f64;
        let value = -x.f32s()?.iter().map(|x| f64::from(x - level).powi(2)).sum::<f64>() / n;
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |d: &Tensor| {
                let slope = d.item()? * -2.0 / n as f32;
                Tensor::new(x.f32s()?.iter().map(|x| slope * (x - level)).collect::<Vec<f32>>(), x.shape())
            })
        });
        Ok((Score::of(value), pullback))
    }
}
