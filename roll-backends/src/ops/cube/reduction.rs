//! Sums and largest values over the units of a cube, as trees in shared memory: the number of units is a power of two, and
//! nothing depends on the width of a plane.

use cubecl::prelude::*;

/// The sum over the units of a cube, which every unit gets.
#[cube]
pub fn total(partial: &mut Shared<[f32]>, own: f32) -> f32 {
    // No unit may still read the previous values.
    sync_cube();
    partial[UNIT_POS as usize] = own;
    sync_cube();
    let mut active = CUBE_DIM / 2;
    while active > 0 {
        if UNIT_POS < active {
            let other = partial[(UNIT_POS + active) as usize];
            partial[UNIT_POS as usize] += other;
        }
        sync_cube();
        active /= 2;
    }
    partial[0]
}

/// The largest value of the units of a cube, which every unit gets.
#[cube]
pub fn largest(partial: &mut Shared<[f32]>, own: f32) -> f32 {
    // No unit may still read the previous values.
    sync_cube();
    partial[UNIT_POS as usize] = own;
    sync_cube();
    let mut active = CUBE_DIM / 2;
    while active > 0 {
        if UNIT_POS < active {
            let here = partial[UNIT_POS as usize];
            let other = partial[(UNIT_POS + active) as usize];
            let more: f32 = max(here, other);
            partial[UNIT_POS as usize] = more;
        }
        sync_cube();
        active /= 2;
    }
    partial[0]
}
