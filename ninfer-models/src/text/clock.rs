//! Dates for templates that print the current one.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A UTC date and time in the proleptic Gregorian calendar.
struct Civil {
    year: i64,
    /// 1 to 12.
    month: usize,
    /// 1 to 31.
    day: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 is Sunday.
    weekday: usize,
    /// Second of the day.
    second: i64,
}

impl Civil {
    fn new(time: SystemTime) -> Self {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |s| -s),
        };
        let days = seconds.div_euclid(86_400);
        // Count from 1 March of year 0, so that the leap day is the last of a year; 146097 days are 400 years.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        // 1 March is day 60 of an ordinary year; January and February are the last 59 or 60 days counted from March.
        let day_of_year = if month > 2 { day_from_march + 60 + i64::from(leap) } else { day_from_march - 305 };
        Self {
            year,
            month: month as usize,
            day,
            day_of_year,
            weekday: (days + 4).rem_euclid(7) as usize,
            second: seconds.rem_euclid(86_400),
        }
    }
}

/// Formats a time in UTC by the directives of C's `strftime`, in English.
///
/// Unknown directives are copied as they stand.
pub(super) fn strftime(format: &str, time: SystemTime) -> String {
    let at = Civil::new(time);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match rest.next() {
            Some('-') => match rest.next() {
                Some(directive) => {
                    let mut padded = String::new();
                    write_directive(&mut padded, directive, &at);
                    let bare = padded.trim_start_matches(['0', ' ']);
                    out.push_str(if bare.is_empty() && !padded.is_empty() { "0" } else { bare });
                }
                None => out.push_str("%-"),
            },
            Some(directive) => write_directive(&mut out, directive, &at),
            None => out.push('%'),
        }
    }
    out
}

fn write_directive(out: &mut String, directive: char, at: &Civil) {
    let (hour, minute, second) = (at.second / 3_600, at.second / 60 % 60, at.second % 60);
    let month = MONTHS.get(at.month.wrapping_sub(1)).copied().unwrap_or_default();
    let weekday = DAYS.get(at.weekday).copied().unwrap_or_default();
    let short = |name: &'static str| name.get(..3).unwrap_or(name);
    let hour12 = (hour + 11) % 12 + 1;
    // Writing to a String cannot fail.
    let _ = match directive {
        'Y' => write!(out, "{}", at.year),
        'y' => write!(out, "{:02}", at.year.rem_euclid(100)),
        'm' => write!(out, "{:02}", at.month),
        'd' => write!(out, "{:02}", at.day),
        'e' => write!(out, "{:2}", at.day),
        'j' => write!(out, "{:03}", at.day_of_year),
        'H' => write!(out, "{hour:02}"),
        'I' => write!(out, "{hour12:02}"),
        'M' => write!(out, "{minute:02}"),
        'S' => write!(out, "{second:02}"),
        'p' => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
        'B' => write!(out, "{month}"),
        'b' | 'h' => write!(out, "{}", short(month)),
        'A' => write!(out, "{weekday}"),
        'a' => write!(out, "{}", short(weekday)),
        'w' => write!(out, "{}", at.weekday),
        'F' => write!(out, "{}-{:02}-{:02}", at.year, at.month, at.day),
        'T' => write!(out, "{hour:02}:{minute:02}:{second:02}"),
        'R' => write!(out, "{hour:02}:{minute:02}"),
        'D' => write!(out, "{:02}/{:02}/{:02}", at.month, at.day, at.year.rem_euclid(100)),
        'Z' => write!(out, "UTC"),
        'z' => write!(out, "+0000"),
        '%' => write!(out, "%"),
        other => write!(out, "%{other}"),
    };
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(format: &str, seconds: u64) -> String {
        strftime(format, UNIX_EPOCH + Duration::from_secs(seconds))
    }

    #[test]
    fn known_dates() {
        assert_eq!(at("%F %T %a %j", 0), "1970-01-01 00:00:00 Thu 001");
        assert_eq!(at("%Y-%m-%d %H:%M:%S", 951_782_400), "2000-02-29 00:00:00");
        assert_eq!(at("%d %B %Y, %A, day %j", 1_709_251_199), "29 February 2024, Thursday, day 060");
        assert_eq!(at("%F %j", 1_709_251_200), "2024-03-01 061");
        assert_eq!(at("%F %j", 1_735_603_200), "2024-12-31 366");
        assert_eq!(at("%F %j", 1_767_139_200), "2025-12-31 365");
        assert_eq!(at("%F %j", 1_740_787_200), "2025-03-01 060");
        assert_eq!(at("%F", 4_107_542_400), "2100-03-01");
        assert_eq!(strftime("%F %T", UNIX_EPOCH - Duration::from_secs(1)), "1969-12-31 23:59:59");
    }

    #[test]
    fn directives() {
        assert_eq!(at("%I:%M %p", 0), "12:00 AM");
        assert_eq!(at("%I:%M %p", 13 * 3_600 + 5 * 60), "01:05 PM");
        assert_eq!(at("%-d %b %y|%e|%-H", 0), "1 Jan 70| 1|0");
        assert_eq!(at("%%%Q%", 0), "%%Q%");
        assert_eq!(at("%R %D %Z%z %w %-", 86_399), "23:59 01/01/70 UTC+0000 4 %-");
    }

    #[test]
    fn extreme_times_do_not_overflow() {
        for shift in [u64::MAX, i64::MAX as u64, 1 << 55] {
            let (epoch, shift) = (UNIX_EPOCH, Duration::from_secs(shift));
            for time in [epoch.checked_add(shift), epoch.checked_sub(shift)].into_iter().flatten() {
                assert!(!strftime("%F %T %j", time).is_empty());
            }
        }
    }
}
