use super::*;

fn pixel(picture: &Picture, [x, y]: [f32; 2]) -> [f32; 3] {
    let [h, w] = picture.size;
    let at = (y.round() as usize).min(h - 1) * w + (x.round() as usize).min(w - 1);
    [0, 1, 2].map(|c| picture.pixels[c * h * w + at])
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_people_differ() {
    let size = [64, 64];
    let one = clip(7, 3, 5, size);
    assert_eq!(one, clip(7, 3, 5, size));
    assert_ne!(one.pictures, clip(8, 3, 5, size).pictures);
    let far = |a: &Picture, b: &Picture| {
        a.pixels.iter().zip(&b.pixels).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.pixels.len() as f32
    };
    let neutral = |seed| render(&Identity::new(seed), &Shot::default(), size);
    for seed in 0..20 {
        assert!(far(&neutral(seed), &neutral(seed + 1)) > 0.03, "{seed}");
    }
}

#[test]
fn landmarks_lie_inside_the_face_and_on_what_they_name() {
    let mut draw = roll_core::Noise::new(1).uniform(roll_core::Purpose::Synthetic, 0, 0);
    for seed in 0..200 {
        let identity = Identity { glasses: None, fringe: 0.0, ..Identity::new(seed) };
        let shot = Shot { blink: 0.0, gaze: [0.0; 2], ..random_shot(&mut draw) };
        let picture = render(&identity, &shot, [192, 192]);
        let [x1, y1, x2, y2] = picture.bounds;
        for [x, y] in picture.landmarks {
            assert!(x > x1 && x < x2 && y > y1 && y < y2, "{seed}: {x} {y} outside {:?}", picture.bounds);
        }
        let [left, right, nose, corner_left, corner_right] = picture.landmarks;
        assert!(left[0] < right[0] && corner_left[0] < corner_right[0]);
        assert!(nose[1] < corner_left[1].max(corner_right[1]));
        if shot.yaw.abs() < 0.3 {
            for eye in [left, right] {
                let dark = pixel(&picture, eye).iter().sum::<f32>() / 3.0;
                assert!(dark < -0.5, "{seed}: no pupil at {eye:?}: {dark}");
            }
        }
    }
}

#[test]
fn a_turn_moves_the_nose_its_way_and_hides_the_far_side() {
    let identity = Identity::new(3);
    let at = |yaw| render(&identity, &Shot { yaw, ..Shot::default() }, [64, 64]).landmarks;
    let (left, front, right) = (at(-0.4), at(0.0), at(0.4));
    assert!(left[2][0] < front[2][0] && front[2][0] < right[2][0]);
    // The two pictures are mirror images.
    let middle = 0.5 * 64.0 - 0.5;
    assert!((left[2][0] - middle + right[2][0] - middle).abs() < 1e-3);
    let gap = |l: [[f32; 2]; 5]| [l[2][0] - l[0][0], l[1][0] - l[2][0]];
    assert!(gap(right)[1] < gap(right)[0]);
}

#[test]
fn every_prompt_of_a_clip_is_one_of_those_listed() {
    let all: std::collections::HashSet<String> = prompts().into_iter().map(|(p, _)| p).collect();
    for seed in 0..50 {
        assert!(all.contains(&clip(seed, seed, 1, [16, 16]).prompt));
    }
}
