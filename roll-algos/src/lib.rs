//! Algorithms: Reward-FL.
