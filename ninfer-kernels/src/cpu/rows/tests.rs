use ninfer_core::{Backend, DType, View};

use super::*;

fn read(profile: Profile, rows: usize, table: &[[i32; SEGMENT_WORDS]]) -> Result<Rows> {
    let cpu = Cpu::with_threads(1)?;
    let mut queue = cpu.queue()?;
    let words = table.as_flattened();
    let view = View::new(cpu.alloc("table", words.len() * 4)?, DType::I32, 0, table.len(), SEGMENT_WORDS)?;
    cpu.upload(&mut queue, &view, bytemuck::cast_slice(words))?;
    let batch = Batch::new(profile, rows, view)?;
    Rows::read(&Access::new("test"), "test", &batch)
}

#[test]
fn segments_are_checked() {
    // slot, start, row, len, fold, bank
    let good = [3, 70, 2, 5, 70, 1, 0, 0];
    assert!(read(Profile::Step, 7, &[good]).is_ok());
    let bad = |place: usize, word: i32| {
        let mut segment = good;
        segment[place] = word;
        let error =
            read(Profile::Step, 7, &[[0; 8], segment]).err().unwrap_or_else(|| panic!("{segment:?} is accepted"));
        assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    };
    (0..6).for_each(|place| bad(place, -1));
    (0..6).for_each(|place| bad(place, i32::MIN));
    bad(2, 3);
    bad(3, 6);
    bad(2, i32::MAX);
    bad(3, i32::MAX);
    bad(4, 71);
    bad(5, 2);
    // An empty segment may stand anywhere.
    assert!(read(Profile::Step, 7, &[[0, 0, i32::MAX, 0, 0, 0, 0, 0]]).is_ok());
    assert!(read(Profile::Step, 0, &[]).is_ok());
    assert!(matches!(read(Profile::Prefill, 200, &[[0; 8]; MAX_SEGMENTS + 1]), Err(Error::Shape { .. })));
}

#[test]
fn rows_have_owners() {
    let rows = read(Profile::Step, 9, &[[0, 0, 2, 3, 0, 0, 0, 0], [1, 0, 7, 1, 0, 0, 0, 0]]).unwrap();
    let owned: Vec<usize> = (0..9).filter(|&r| rows.owns(r)).collect();
    assert_eq!(owned, [2, 3, 4, 7]);
}

/// Tiles begin at multiples of their size by position, whatever row the segment begins at.
#[test]
fn tiles_stand_at_absolute_positions() {
    let table = [
        [0, 60, 3, 70, 0, 0, 0, 0],
        [1, 5, 0, 0, 0, 0, 0, 0],
        [2, 128, 80, 64, 0, 0, 0, 0],
        [0, 63, 73, 1, 0, 0, 0, 0],
    ];
    let rows = read(Profile::Prefill, 144, &table).unwrap();
    let tile = |row, offset, len| Tile { row, offset, len };
    let tiles: Vec<Tile> = rows.tiles(64).collect();
    assert_eq!(tiles, [tile(3, 60, 4), tile(7, 0, 64), tile(71, 0, 2), tile(80, 0, 64), tile(73, 63, 1)]);
}
