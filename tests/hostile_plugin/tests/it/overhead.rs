//! What a call across the boundary costs, as microseconds of the same call on a component that is linked in and on one
//! of the library:
//!
//! ```sh
//! cargo test --release --workspace --test it -- --ignored --nocapture a_call_costs
//! ```

use std::time::Instant;

use roll_core::{Adapter, ConditionInput, Grad, OptimizerConfig, Options, Silent, Tensor, Timestep};
use roll_testing::Bigram;

use super::contract::{World, environment, model, reward, strategy};
use super::{context, plugin, registry, video};

/// Microseconds of a call: the least mean of several rounds, which other work on the machine disturbs the least.
fn microseconds(mut call: impl FnMut()) -> f64 {
    let calls = 500;
    let round = |call: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
    };
    (0..15).map(|_| round(&mut call)).fold(f64::INFINITY, f64::min)
}

fn score(loaded: bool, grad: Grad) -> f64 {
    let (mut reward, video) = (reward(loaded, ""), video());
    let target = reward.prepare(&video).unwrap();
    microseconds(|| {
        let (_, pullback) = reward.score(&video, "a prompt", &target, grad).unwrap();
        pullback.map(|pullback| pullback.pull(&Tensor::scalar(1.0)).unwrap());
    })
}

fn velocity(loaded: bool, grad: Grad) -> f64 {
    let mut model = model(loaded, "");
    let model = model.as_diffusion().unwrap();
    let input = ConditionInput { prompt: "p".into(), frames: 2, size: [1, 2], ..ConditionInput::default() };
    let conditioning = model.encode(&input).unwrap();
    let x = Tensor::full(conditioning.latent_shape, 0.5);
    microseconds(|| {
        let (v, pullback) = model.velocity(&x, Timestep(500.0), &conditioning, Adapter::On, grad).unwrap();
        pullback.map(|pullback| pullback.pull(&v).unwrap());
    })
}

fn read_parameters(loaded: bool) -> f64 {
    let (model, mut values) = (model(loaded, ""), [0.0; 64]);
    microseconds(|| model.read_parameters(&mut values).unwrap())
}

/// The strategy reads the gradients of a linked model by parts: four calls back.
fn accumulate(loaded: bool) -> f64 {
    let (mut model, mut strategy) = (model(false, ""), strategy(loaded, ""));
    strategy.attach(model.as_mut(), &OptimizerConfig::default()).unwrap();
    microseconds(|| strategy.accumulate(model.as_mut()).unwrap())
}

fn environment_step(loaded: bool) -> f64 {
    let mut environment = environment(loaded, "");
    environment.reset(u64::MAX).unwrap();
    microseconds(|| drop(environment.step("up").unwrap()))
}

fn evaluate(loaded: bool) -> f64 {
    let mut model: Box<dyn roll_core::Model> = match loaded {
        true => registry(&plugin("hostile_plugin")).model("bigram", &Options::new(), &context()).unwrap(),
        false => Box::new(Bigram::of("xyz")),
    };
    let model = model.as_language().unwrap();
    let tokens = Tensor::new(vec![120i64, 121, 122, 121], [1, 4]).unwrap();
    let mask = Tensor::new(vec![1u8; 4], [1, 4]).unwrap();
    microseconds(|| drop(model.evaluate(&tokens, &mask, &mask, Adapter::On, Grad::Skip).unwrap()))
}

/// A step of two samples; model, reward and strategy are linked: 84 calls back.
fn algorithm_step(loaded: bool) -> f64 {
    let mut world = World::new(if loaded { 8 } else { 0 }, "");
    world.algorithm.check(world.model.as_mut(), Some(world.reward.as_ref())).unwrap();
    world.strategy.attach(world.model.as_mut(), &OptimizerConfig::default()).unwrap();
    microseconds(|| drop(world.step(0, &Silent).unwrap()))
}

#[test]
#[ignore = "a measurement: --nocapture prints it"]
fn a_call_costs_microseconds() {
    let cases: [(&str, &dyn Fn(bool) -> f64); 9] = [
        ("score", &|loaded| score(loaded, Grad::Skip)),
        ("score and pull", &|loaded| score(loaded, Grad::Record)),
        ("velocity", &|loaded| velocity(loaded, Grad::Skip)),
        ("velocity and pull", &|loaded| velocity(loaded, Grad::Record)),
        ("evaluate tokens", &evaluate),
        ("read_parameters", &read_parameters),
        ("accumulate", &accumulate),
        ("environment step", &environment_step),
        ("algorithm step", &algorithm_step),
    ];
    println!("{:<20} {:>10} {:>10} {:>10}   microseconds", "", "linked", "loaded", "difference");
    for (name, measure) in cases {
        let [linked, loaded] = [false, true].map(measure);
        println!("{name:<20} {linked:>10.2} {loaded:>10.2} {:>10.2}", loaded - linked);
    }
}
