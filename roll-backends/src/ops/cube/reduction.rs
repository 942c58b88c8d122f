//! Sums and maxima over the units of a cube, as trees in shared memory. The number of units must be a power of two;
//! nothing depends on the width of a plane.

use cubecl::prelude::*;

/// The sum of the units' `value`s, returned to every unit. `partial` has one number per unit.
#[cube]
pub fn sum_over_units(partial: &mut Shared<[f32]>, value: f32) -> f32 {
    // Waits until no unit reads the values of an earlier reduction.
    sync_cube();
    partial[UNIT_POS as usize] = value;
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

/// The maximum of the units' `value`s, returned to every unit. `partial` has one number per unit.
#[cube]
pub fn max_over_units(partial: &mut Shared<[f32]>, value: f32) -> f32 {
    // Waits until no unit reads the values of an earlier reduction.
    sync_cube();
    partial[UNIT_POS as usize] = value;
    sync_cube();
    let mut active = CUBE_DIM / 2;
    while active > 0 {
        if UNIT_POS < active {
            let here = partial[UNIT_POS as usize];
            let other = partial[(UNIT_POS + active) as usize];
            let larger: f32 = max(here, other);
            partial[UNIT_POS as usize] = larger;
        }
        sync_cube();
        active /= 2;
    }
    partial[0]
}
