package mps

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

const mib = 1 << 20

// Memory that was measured on an H200: of a server, and of a client's context.
const serverMemory = 66 * mib

// contextMemory is what a context of so many multiprocessors takes: 72 MiB of 12,
// 145 of 32, 271 of 66, 514 of 132 (measured; a line through them).
func contextMemory(multiprocessors uint32) uint64 {
	return (28_000 + 3685*uint64(multiprocessors)) / 1000 * mib
}

// directMemory is what a context without MPS takes beyond that.
const directMemory = 12 * mib

// portion is how many of a device's multiprocessors a percentage is: whole pairs
// (measured: 10 % of 132 are 12, 25 % 32, 50 % 66, 90 % 118), at least one pair.
func portion(multiprocessors uint32, percentage float64) uint32 {
	if percentage >= 100 {
		return multiprocessors
	}
	n := uint32(float64(multiprocessors)*percentage/100) / 2 * 2
	return min(max(n, 2), multiprocessors)
}

// parsePercentage takes more than 0 up to 100.
func parsePercentage(s string) (float64, bool) {
	p, err := strconv.ParseFloat(s, 64)
	return p, err == nil && p > 0 && p <= 100
}

// parseSize reads a number of bytes, or of K, M or G (of 1024).
func parseSize(s string) (uint64, bool) {
	digits := strings.TrimRight(strings.ToUpper(s), "BI")
	shift := 0
	for i, unit := range []string{"K", "M", "G"} {
		if rest, ok := strings.CutSuffix(digits, unit); ok {
			digits, shift = rest, 10*(i+1)
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return n << shift, err == nil && n <= math.MaxUint64>>shift
}

// said is how a limit is told when it is asked for: in the largest unit of which
// there is one, rounded down. 71513M is "69G" (measured).
func said(limit string) string {
	n, ok := parseSize(limit)
	if !ok {
		return limit
	}
	for i, unit := range []string{"G", "M", "K"} {
		if shift := 30 - 10*i; n>>shift > 0 {
			return fmt.Sprintf("%d%s", n>>shift, unit)
		}
	}
	return limit
}

// limits are memory limits by device, as they were given: "0" → "3G". Only those
// that name a device by its index work; others are ignored, as the real ones do.
type limits map[string]string

// parseLimits reads CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: "0=1G,1=2G". What can't be
// read is left out.
func parseLimits(s string) limits {
	l := limits{}
	for part := range strings.SplitSeq(s, ",") {
		if device, value, ok := strings.Cut(strings.TrimSpace(part), "="); ok {
			l[device] = value
		}
	}
	return l
}

// of is the limit of a device; the largest number where there is none.
func (l limits) of(index int) uint64 {
	if n, ok := parseSize(l[strconv.Itoa(index)]); ok {
		return n
	}
	return math.MaxUint64
}

// clientLimit is what a client may have of a device: the lower one of the
// server's and its own. One of its own that doesn't name the device takes the
// server's away (measured).
func clientLimit(server limits, own string, index int) uint64 {
	if own == "" {
		return server.of(index)
	}
	wanted := parseLimits(own).of(index)
	if wanted == math.MaxUint64 {
		return wanted
	}
	return min(wanted, server.of(index))
}

// clientPercentage is the lower one of the server's and the client's own.
func clientPercentage(server float64, own string) float64 {
	if p, ok := parsePercentage(own); ok {
		return min(p, server)
	}
	return server
}
