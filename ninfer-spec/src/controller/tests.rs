use super::*;
use ninfer_core::sampling::{Purpose, uniform};

/// A simulated machine and text: everything is decided by numbers, nothing by a real clock.
#[derive(Clone, Copy)]
struct World {
    /// Seconds of a plain round.
    plain: f64,
    /// Seconds that one more draft adds to verification, and to the making of drafts on the device.
    verify: f64,
    make: f64,
    /// Whether drafts are made in the round before the one that verifies them.
    ahead: bool,
    /// Relative noise of times.
    noise: f64,
}

const CHEAP: World = World { plain: 0.01, verify: 0.001, make: 0.0005, ahead: true, noise: 0.0 };

struct Run {
    /// Tokens, seconds and drafts of each round.
    rounds: Vec<(usize, f64, usize)>,
}

fn simulate(world: World, max: usize, tokens: usize, seed: u64, acceptance: impl Fn(usize) -> f64) -> Run {
    let mut controller = Controller::new(max);
    let mut rounds = Vec::new();
    let (mut emitted, mut made) = (0, 0);
    while emitted < tokens {
        let round = rounds.len() as u64;
        let drafted = if world.ahead { made } else { controller.choose(0) };
        let next = if world.ahead { controller.choose(drafted) } else { 0 };
        let alpha = acceptance(emitted);
        let accepted = (0..drafted).take_while(|&i| uniform(seed, round, Purpose::Accept, i as u32) < alpha).count();
        let noise = 1.0 + world.noise * (uniform(seed, round, Purpose::Draft, 0) - 0.5);
        let seconds = (world.plain + world.verify * drafted as f64 + world.make * next as f64) * noise;
        controller.observe(Observation { drafted, accepted, next, seconds });
        made = next;
        emitted += accepted + 1;
        rounds.push((accepted + 1, seconds, drafted));
    }
    Run { rounds }
}

impl Run {
    /// Largest loss against plain decoding over any stretch of rounds with at least 256 tokens, as a share.
    fn largest_loss(&self, plain: f64) -> f64 {
        let mut worst = f64::NEG_INFINITY;
        for start in 0..self.rounds.len() {
            let (mut tokens, mut seconds) = (0, 0.0);
            for &(n, s, _) in &self.rounds[start..] {
                tokens += n;
                seconds += s;
                if tokens >= WINDOW {
                    worst = worst.max(seconds / (tokens as f64 * plain) - 1.0);
                    break;
                }
            }
        }
        worst
    }

    fn share(&self, from: usize, drafts: impl Fn(usize) -> bool) -> f64 {
        let rounds = &self.rounds[from..];
        rounds.iter().filter(|r| drafts(r.2)).count() as f64 / rounds.len() as f64
    }

    fn speed(&self) -> f64 {
        let tokens: usize = self.rounds.iter().map(|r| r.0).sum();
        tokens as f64 / self.rounds.iter().map(|r| r.1).sum::<f64>()
    }
}

#[test]
fn bad_drafts_lead_to_plain_decoding() {
    // A draft costs 30 % of a plain round: 0.2 more tokens for 0.3 more time never pays.
    for ahead in [false, true] {
        let world = World { verify: 0.002, make: if ahead { 0.001 } else { 0.0 }, ahead, ..CHEAP };
        let world = if ahead { world } else { World { verify: 0.003, ..world } };
        for seed in 0..10 {
            let run = simulate(world, 5, 2000, seed, |_| 0.2);
            let share = run.share(150, |k| k == 0);
            assert!(share > 0.85, "seed {seed}: only {share} of the rounds are plain");
            assert!(run.largest_loss(world.plain) <= LARGEST_LOSS);
        }
    }
}

#[test]
fn good_drafts_lead_to_the_most() {
    for ahead in [false, true] {
        for max in [1, 3, 5, 8] {
            for seed in 0..5 {
                let world = World { ahead, ..CHEAP };
                let run = simulate(world, max, 2000, seed, |_| 0.9);
                // Seven and eight drafts are equally fast here (5.7 / 2.05 and 6.13 / 2.2), so six are close enough to eight.
                let share = run.share(20, |k| k >= max.min(6));
                assert!(share > 0.8, "max {max}, seed {seed}: only {share} of the rounds have all drafts");
            }
        }
    }
}

#[test]
fn changes_are_followed() {
    for ahead in [false, true] {
        let world = World { verify: 0.002, ahead, ..CHEAP };
        for seed in 0..10 {
            // Bad, good, bad again: 1500 tokens each.
            let run = simulate(world, 4, 4500, seed, |t| if (1500..3000).contains(&t) { 0.95 } else { 0.1 });
            let mut tokens = 0;
            let mut phases = [(0, 0, 0); 3];
            for &(n, _, drafted) in &run.rounds {
                // The first 250 tokens of a phase are for noticing.
                if tokens % 1500 >= 250 {
                    let phase: &mut (usize, usize, usize) = &mut phases[(tokens / 1500).min(2)];
                    phase.0 += 1;
                    phase.1 += usize::from(drafted == 0);
                    phase.2 += usize::from(drafted == 4);
                }
                tokens += n;
            }
            assert!(phases[0].1 * 10 > phases[0].0 * 8, "seed {seed}: {phases:?}");
            assert!(phases[1].2 * 10 > phases[1].0 * 7, "seed {seed}: {phases:?}");
            assert!(phases[2].1 * 10 > phases[2].0 * 8, "seed {seed}: {phases:?}");
            assert!(run.largest_loss(world.plain) <= LARGEST_LOSS, "seed {seed}");
        }
    }
}

#[test]
fn never_much_slower_than_plain() {
    for ahead in [false, true] {
        for (verify, make) in [(0.0, 0.0), (0.0005, 0.0005), (0.003, 0.001), (0.01, 0.0), (0.03, 0.01), (0.05, 0.0)] {
            for max in [1, 4, 15] {
                let world = World { verify, make: if ahead { make } else { 0.0 }, ahead, ..CHEAP };
                for alpha in [0.0, 0.2, 0.4, 0.6, 0.8] {
                    let run = simulate(world, max, 1500, max as u64, |_| alpha);
                    let loss = run.largest_loss(world.plain);
                    assert!(loss <= LARGEST_LOSS, "{verify} {make} {max} {alpha} {ahead}: loss {loss}");
                }
                // Drafts that are good just until they are relied on.
                for period in [40, 150, 300] {
                    let run = simulate(world, max, 3000, 9, |t| if (t / period) % 2 == 0 { 0.95 } else { 0.0 });
                    let loss = run.largest_loss(world.plain);
                    assert!(loss <= LARGEST_LOSS, "{verify} {make} {max} period {period} {ahead}: loss {loss}");
                }
            }
        }
    }
}

#[test]
fn noise_of_times_does_not_mislead() {
    let world = World { noise: 0.2, ..CHEAP };
    let run = simulate(world, 5, 3000, 1, |_| 0.9);
    assert!(run.share(30, |k| k >= 4) > 0.8);
    let world = World { verify: 0.004, make: 0.002, ..world };
    let run = simulate(world, 5, 3000, 1, |_| 0.2);
    assert!(run.share(150, |k| k == 0) > 0.85);
}

/// While every round has drafts, the cost of a plain one is measured again from time to time.
#[test]
fn a_plain_round_that_became_cheap_is_noticed() {
    let mut controller = Controller::new(1);
    let mut plain = 0;
    for round in 0..1000u64 {
        let drafted = controller.choose(0);
        let accepted = usize::from(drafted == 1 && uniform(1, round, Purpose::Accept, 0) < 0.8);
        // 1.8 tokens in 14 ms are faster than one in 10 ms, and slower than one in 5 ms.
        let seconds = if drafted == 1 { 0.014 } else { 0.01 - 0.005 * f64::from(u8::from(round >= 300)) };
        controller.observe(Observation { drafted, accepted, next: 0, seconds });
        plain += usize::from(drafted == 0 && round >= 500);
    }
    assert!(plain > 400, "{plain} of the last 500 rounds are plain");
}

/// Rounds until drafts are verified in four rounds of five, from the moment they become good.
#[test]
fn one_good_trial_is_soon_followed_by_more() {
    let mut controller = Controller::new(3);
    let mut recent = VecDeque::new();
    let mut good_for = 0;
    for round in 0..2000u64 {
        let drafted = controller.choose(0);
        // Good from the first trial after round 1000 on.
        let is_good = good_for > 0 || (round >= 1000 && drafted > 0);
        let accepted = if is_good { drafted } else { 0 };
        good_for += usize::from(is_good);
        let seconds = 0.01 + 0.003 * drafted as f64;
        controller.observe(Observation { drafted, accepted, next: 0, seconds });
        recent.push_front(drafted > 0);
        recent.truncate(5);
        if is_good && recent.iter().filter(|&&d| d).count() >= 4 {
            assert!(good_for < 60, "{good_for} rounds");
            return;
        }
    }
    panic!("good drafts were never noticed");
}

/// A position that was bad and became good is noticed although rounds stop before it.
#[test]
fn deeper_drafts_are_tried_again() {
    let mut controller = Controller::new(3);
    let (mut shallow, mut deep) = (0, 0);
    for round in 0..3000u64 {
        let drafted = controller.choose(0);
        let good = if round < 1000 { 1 } else { 3 };
        let accepted =
            (0..drafted).take_while(|&i| i < good && uniform(2, round, Purpose::Accept, i as u32) < 0.95).count();
        let seconds = 0.01 + 0.001 * drafted as f64;
        controller.observe(Observation { drafted, accepted, next: 0, seconds });
        deep += usize::from(drafted == 3 && round >= 2000);
        shallow += usize::from(drafted == 1 && (200..1000).contains(&round));
    }
    assert!(shallow > 700, "{shallow} of 800 rounds have one draft");
    assert!(deep > 800, "{deep} of the last 1000 rounds have three drafts");
}

#[test]
fn close_to_the_best_fixed_number() {
    // Acceptance 0.6 and 15 % a draft: (1 + 0.6) / 1.15, (1.96) / 1.3, 2.176 / 1.45 …: two drafts are best, with 1.508.
    let world = World { verify: 0.001, make: 0.0005, ..CHEAP };
    let mean: f64 = (0..10).map(|seed| simulate(world, 6, 3000, seed, |_| 0.6).speed()).sum::<f64>() / 10.0;
    assert!(mean * world.plain > 0.95 * 1.508, "{}", mean * world.plain);
}

#[test]
fn trials_keep_an_mtp_cache_alive() {
    let world = World { verify: 0.002, ..CHEAP };
    let run = simulate(world, 3, 3000, 4, |_| 0.0);
    let mut behind = 0;
    for &(n, _, drafted) in &run.rounds {
        behind = if drafted > 0 { 0 } else { behind + n };
        assert!(behind <= 64, "{behind} tokens without a trial");
    }
}

#[test]
fn measured_costs_carry_over() {
    let mut first = Controller::new(3);
    assert_eq!(first.choose(0), 0);
    for drafted in [0, 0, 1, 2, 3] {
        first.observe(Observation { drafted, accepted: drafted, next: 0, seconds: 1.0 + 0.1 * drafted as f64 });
    }
    let second = Controller::with_costs(3, first.costs().clone());
    assert!(second.choose(0) > 0, "no plain rounds are needed to learn the cost of one");
    assert_eq!(Controller::with_costs(5, first.costs().clone()).choose(0), 0, "a table that is too small is not used");
}
