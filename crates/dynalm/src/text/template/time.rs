//! `strftime_now`: today's date as a template wants it, in UTC.

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
const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];

/// Seconds since 1970-01-01T00:00:00Z.
pub(super) fn now() -> i64 {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        Err(_) => 0,
    }
}

/// Formats a moment by Python's `strftime` directives; `Err` names one that is not supported.
pub(super) fn strftime(format: &str, seconds: i64) -> Result<String, String> {
    let days = seconds.div_euclid(86_400);
    let in_day = seconds.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    // 1970-01-01 was a Thursday.
    let weekday = (days + 3).rem_euclid(7) as usize;
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next().ok_or("a lone `%` at the end")?;
        // `%-d` is `%d` without the leading zero.
        let bare = directive == '-';
        if bare {
            directive = chars.next().ok_or("a lone `%-` at the end")?;
        }
        let mut number = |value: i64, width: usize| {
            let _ = if bare {
                write!(out, "{value}")
            } else {
                write!(out, "{value:0width$}")
            };
        };
        match directive {
            'Y' => number(year, 4),
            'y' => number(year.rem_euclid(100), 2),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'H' => number(hour, 2),
            'I' => number(hour12, 2),
            'M' => number(minute, 2),
            'S' => number(second, 2),
            'j' => number(days - days_from_civil(year, 1, 1) + 1, 3),
            'B' => out.push_str(month_name),
            'b' | 'h' => out.push_str(&month_name[..3]),
            'A' => out.push_str(DAYS[weekday]),
            'a' => out.push_str(&DAYS[weekday][..3]),
            'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            'F' => {
                let _ = write!(out, "{year:04}-{month:02}-{day:02}");
            }
            'T' => {
                let _ = write!(out, "{hour:02}:{minute:02}:{second:02}");
            }
            'Z' => out.push_str("UTC"),
            'z' => out.push_str("+0000"),
            '%' => out.push('%'),
            other => return Err(format!("`%{other}` is not supported")),
        }
    }
    Ok(out)
}

/// Year, month and day of a day count since 1970-01-01 (proleptic Gregorian calendar, years of March to February).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_over_centuries() {
        for days in (-800_000..800_000).step_by(97) {
            let (year, month, day) = civil(days);
            assert_eq!(days_from_civil(year, month, day), days);
        }
        assert_eq!(strftime("%d %b %Y", 1_721_952_000).unwrap(), "26 Jul 2024");
        assert_eq!(
            strftime("%A, %B %-d %Y %H:%M:%S %j %%", 951_827_696).unwrap(),
            "Tuesday, February 29 2000 12:34:56 060 %"
        );
        assert!(strftime("%Q", 0).unwrap_err().contains("%Q"));
    }
}
