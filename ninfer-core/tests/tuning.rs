//! The tuning formulas on every size of device, and against the constants of the card they come from.

use ninfer_core::capability::Capability;
use ninfer_core::device::DeviceInfo;
use ninfer_core::tuning::{self, Effect, HostWait, attention, gdn, moe, waves};

const SMS: [u32; 12] = [16, 36, 48, 68, 82, 84, 108, 128, 132, 144, 170, 188];

fn device(sms: u32) -> DeviceInfo {
    DeviceInfo::cuda(format!("{sms} SMs"), Capability::new(8, 0), sms)
}

#[test]
fn constants_of_the_170_sm_card() {
    let values: Vec<u64> = tuning::table(&device(170)).iter().map(|r| r.value).collect();
    let expected = [680, 85, 170, 168, 170, 10, 160, 320, 85, 32, 510, 5440, 3, 1020, 340, 680, 1024];
    assert_eq!(values, expected);
    assert_eq!(2 * attention::int8_wide_splits(&device(170), 2), 168);
    assert_eq!(attention::int8_wide_splits(&device(170), 1), 168);
}

#[test]
fn a_48_sm_part_gets_its_own_values() {
    let d = device(48);
    assert_eq!(gdn::output_target(&d), 192);
    assert_eq!([4, 2].map(|h| attention::small_t_splits(&d, h)), [24, 48]);
    assert_eq!((moe::persistent_grid(&d), tuning::rope_token_blocks(&d)), (144, 288));
    assert_eq!(4 * attention::int8_wide_splits(&d, 4), 48);
}

#[test]
fn splits_stay_in_range_on_every_device() {
    for d in SMS.map(device) {
        for kv_heads in [1, 2, 4, 8, 16] {
            let mut all = vec![
                attention::small_t_splits(&d, kv_heads),
                attention::int8_wide_splits(&d, kv_heads),
                attention::bidirectional_splits(&d),
                attention::window_splits(&d, kv_heads, 100),
            ];
            for batch in [1, 2, 3, 8, 16, 1000] {
                for width in [attention::BatchWidth::One, attention::BatchWidth::Two] {
                    all.push(attention::batched_splits(&d, width, batch, kv_heads));
                }
                for query_tiles in [1, 2, 7, 500] {
                    for narrow in [false, true] {
                        let plan = attention::plan(&d, batch, kv_heads, query_tiles, narrow);
                        assert_eq!(plan.tiles, (batch * kv_heads * query_tiles) as u64);
                        if plan.splits > 1 {
                            assert!(plan.tiles * u64::from(plan.splits) <= 2 * u64::from(d.sm_count), "{plan:?}");
                        }
                        all.push(plan.splits);
                    }
                }
            }
            for blocks in [1, 24, 96, 384, 5000] {
                all.push(attention::prompt_splits(&d, blocks, 100_000));
            }
            assert!(all.iter().all(|s| (1..=tuning::MAX_SPLITS).contains(s)), "{}: {all:?}", d.name);
        }
    }
}

#[test]
fn int8_splits_stay_within_one_wave() {
    for d in SMS.map(device) {
        for kv_heads in [1usize, 2, 4, 8] {
            let blocks = u64::from(attention::int8_wide_splits(&d, kv_heads)) * kv_heads as u64;
            assert!(blocks <= u64::from(d.sm_count), "{}: {blocks}", d.name);
        }
    }
}

#[test]
fn gdn_grid_covers_every_chunk_and_keeps_near_its_target() {
    for d in SMS.map(device) {
        for chunks in [0usize, 1, 2, 15, 16, 64, 4097] {
            for heads in [1usize, 16, 32, 48, 64] {
                let g = gdn::output_grid(&d, chunks, heads);
                assert!(g.jobs >= 1 && g.x >= 1 && g.y == heads as u64);
                assert!(g.jobs * g.x >= chunks as u64 && g.jobs * (g.x - 1) < chunks.max(1) as u64, "{g:?}");
                assert!(g.x * g.y <= gdn::output_target(&d) + heads as u64, "{}: {g:?}", d.name);
            }
        }
    }
}

#[test]
fn cooperative_grids_are_resident() {
    for d in SMS.map(device) {
        for occupancy in [1, 2, 4] {
            let limit = waves::residency(&d, occupancy);
            assert_eq!(limit, u64::from(occupancy * d.sm_count));
            for tokens in [1u64, 9, 100, 128, 129, 1024, 4096] {
                for tiles in [tokens.div_ceil(128) * 3, tokens.div_ceil(64) * 2] {
                    for wish in [1, 2, 8, 10, 16] {
                        let split = gdn::cooperative_split(&d, occupancy, tiles, wish);
                        assert!((1..=wish).contains(&split));
                        assert!(split == 1 || tiles * u64::from(split) <= limit, "{}: {tiles}·{split}", d.name);
                        let wider = split * 2;
                        let power = wish.is_power_of_two();
                        assert!(!power || wider > wish || tiles * u64::from(wider) > limit, "halved once too often");
                    }
                }
            }
        }
    }
}

#[test]
fn co_residency_measured_on_an_82_sm_card_is_respected() {
    // 1,024 tokens of 27B: 24 tiles. At one block an SM (82) a split of 2 fits, at two (164) a split of 4.
    assert_eq!(gdn::cooperative_split(&device(82), 1, 24, 8), 2);
    assert_eq!(gdn::cooperative_split(&device(82), 2, 24, 8), 4);
    // 170 SMs hold the split the constants were written for.
    assert_eq!(gdn::cooperative_split(&device(170), 2, 24, 8), 8);
}

#[test]
fn moe_grids_and_paths() {
    for d in SMS.map(device) {
        assert!(moe::persistent_grid(&d) >= 1 && moe::queued_grid(&d) >= moe::persistent_grid(&d));
        for paths in [0u32, 1, 3, 9, 11] {
            for tokens in [0usize, 1, 2, 3, 6, 46] {
                let p = moe::paths_per_block(&d, paths, 512, tokens);
                assert!(p >= 1 && (paths == 0 || paths % p == 0), "{paths} {tokens}: {p}");
            }
        }
    }
}

#[test]
fn columns_in_waves_are_the_last_that_fit() {
    let tile = waves::Tile { rows: 64, columns: 128, occupancy: 2, time: 1.0 };
    for d in SMS.map(device) {
        for rows in [63usize, 64, 5120, 12288] {
            for j in 1..4 {
                let columns = waves::columns_in(&d, j, rows, &tile) as usize;
                let taken = |t: usize| waves::waves(&d, 2, waves::tiles(rows, t, 64, 128));
                assert!(columns == 0 || taken(columns) <= j, "{} {rows} {j}", d.name);
                assert!(taken(columns + 1) > j, "{} {rows} {j}", d.name);
            }
        }
    }
    assert_eq!(waves::cheapest(&device(48), 64, 64, &[]), None);
    assert_eq!(waves::cheapest(&device(48), 64, 64, &[tile, tile]), Some(0));
}

#[test]
fn prefill_chunks_are_multiples_of_64_and_a_wish_wins() {
    let discrete = device(170);
    let integrated = device(48).with_integrated(true);
    assert_eq!((tuning::prefill_chunk(&discrete, None), tuning::prefill_chunk(&integrated, None)), (1024, 4096));
    assert_eq!(tuning::prefill_chunk(&DeviceInfo::cpu(), None), 1024);
    for (gib, chunk) in [(32, 1024), (63, 1024), (64, 4096), (140, 4096)] {
        assert_eq!(tuning::prefill_chunk(&device(132).with_memory(gib << 30), None), chunk, "{gib} GiB");
    }
    for (wish, chunk) in [(0, 64), (1, 64), (64, 64), (65, 128), (8192, 8192)] {
        assert_eq!(tuning::prefill_chunk(&integrated, Some(wish)), chunk);
    }
    assert!(tuning::prefill_chunk(&discrete, Some(usize::MAX)) > 0);
}

#[test]
fn host_waits_by_kind_of_device() {
    assert_eq!(tuning::host_wait(&device(170)), HostWait::Spin);
    assert_eq!(tuning::host_wait(&device(48).with_integrated(true)), HostWait::Yield);
}

#[test]
fn rows_that_would_change_an_accumulation_are_marked() {
    for d in SMS.map(device) {
        for row in tuning::table(&d) {
            assert!(row.value >= 1, "{}: {row:?}", d.name);
            let splits_keys = row.name.contains("attention") || row.name.contains("gating");
            assert_eq!(row.effect == Effect::Numeric, splits_keys, "{row:?}");
        }
    }
}
