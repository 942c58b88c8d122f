//! The networks of rewards in a plan.

use roll_backends::Backend;
use roll_core::plan::{MemoryItem, Needs, Passes, PlanInput};
use roll_core::{BuildContext, Registry, Result, ResultExt};
use roll_train::config::LoadedConfig;
use roll_video::task::{CheckRewards, EvaluationConfig};

use crate::configuration::build_context;

/// Adds the networks of rewards, and of checks that are measured only, to the needs of the model. They are held in all
/// phases; those of a reward with a device of its own are listed under the device. A network whose files are not on this
/// machine is not counted, with a warning.
pub fn add_rewards(loaded: &LoadedConfig, registry: &Registry, input: &PlanInput, needs: &mut Needs) -> Result<()> {
    let evaluation: EvaluationConfig = loaded.section()?;
    let checks = match evaluation.check {
        CheckRewards::Auto => Vec::new(),
        CheckRewards::Listed(checks) => checks,
    };
    // A plan opens no device: that may be one of another machine.
    let backend = Backend::on_the_cpu().name().into();
    let context = BuildContext { headers_only: true, backend, ..build_context(loaded) };
    let unscored = PlanInput { passes: Passes { decoded: Some([0, 0]), ..input.passes.clone() }, ..input.clone() };
    let trained = loaded.config.reward.iter().map(|reward| (reward, input));
    for (reward, input) in trained.chain(checks.iter().map(|check| (check, &unscored))) {
        let own_backend = reward.device.as_deref().map(Backend::of).transpose();
        let own_backend = own_backend.while_doing(|| format!("reading `device` of the reward `{}`", reward.name))?;
        // A CPU computes in host memory, at a speed that the plan does not know.
        let is_on_cpu = own_backend.is_some_and(|backend| !backend.is_numbered());
        let input = PlanInput { memory: input.memory.filter(|_| !is_on_cpu), ..input.clone() };
        match registry.reward_needs(&reward.name, &reward.options, &input, &context) {
            Ok(Some(planned)) => add(needs, &reward.name, reward.device.as_deref(), is_on_cpu, planned),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!("the network of the reward `{}` is not counted: {}", reward.name, error.chain());
            }
        }
    }
    Ok(())
}

/// Adds the needs of the reward `name`, which has the `device`, or that of the model.
fn add(needs: &mut Needs, name: &str, device: Option<&str>, is_on_cpu: bool, planned: Needs) {
    let items = planned.memory.into_iter().map(|item| MemoryItem { name: format!("{name}: {}", item.name), ..item });
    match device {
        Some(_) if is_on_cpu => {
            let on_host = |item: MemoryItem| MemoryItem { host: item.host + item.device, device: 0, ..item };
            needs.memory.extend(items.map(on_host));
        }
        Some(device) => needs.other_devices.entry(device.into()).or_default().extend(items),
        None => needs.memory.extend(items),
    }
    if !is_on_cpu && !needs.time.is_empty() {
        needs.time.extend(planned.time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roll_core::plan::PhaseCost;

    fn planned() -> Needs {
        let time = vec![PhaseCost { name: "time/score".into(), flops: 2.0, moved: 0.0, seconds: 1.0 }];
        Needs { memory: vec![MemoryItem::new("weights", [8, 4], String::new())], time, ..Needs::default() }
    }

    #[test]
    fn networks_of_rewards_are_counted_on_their_devices() {
        let mut needs = planned();
        add(&mut needs, "a", None, false, planned());
        add(&mut needs, "b", Some("cuda:1"), false, planned());
        add(&mut needs, "c", Some("flex"), true, planned());
        let bytes: Vec<_> = needs.memory.iter().map(|item| (item.name.as_str(), item.device, item.host)).collect();
        assert_eq!(bytes, [("weights", 8, 4), ("a: weights", 8, 4), ("c: weights", 0, 12)]);
        assert_eq!(needs.other_devices["cuda:1"][0].device, 8);
        assert_eq!(needs.time.len(), 3, "the time on a CPU is not known");
    }
}
