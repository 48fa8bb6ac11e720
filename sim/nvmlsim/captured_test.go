package nvmlsim_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// The models' tables agree with captures of real machines, where one exists:
// every captured row is in the model with the same numbers, and every profile
// of the model is in the capture.
func TestTablesAreThoseCaptured(t *testing.T) {
	text, err := os.ReadFile("testdata/captured.md")
	check(t, err)
	for section := range strings.SplitSeq(string(text), "\n## ") {
		title, table, _ := strings.Cut(section, "\n")
		id, source, found := strings.Cut(title, ": ")
		if !found {
			continue // the file's introduction
		}
		t.Run(id, func(t *testing.T) {
			model, err := nvmlsim.FindModel(id)
			check(t, err)
			var want []string
			inGiB := false
			for line := range strings.Lines(table) {
				cells := strings.Split(strings.Trim(line, "| \n"), " | ")
				switch {
				case len(cells) != 9:
					continue
				case cells[0] == "profile":
					inGiB = cells[1] == "GiB"
				default:
					want = append(want, strings.Join(cells, " "))
				}
			}
			if len(want) != len(model.MIG.Profiles) {
				t.Errorf("%s shows %d profiles, the model has %d", source, len(want), len(model.MIG.Profiles))
			}
			for _, row := range want {
				if diff := cmp.Diff(row, likeRow(model, row, inGiB)); diff != "" {
					t.Errorf("%s (-captured +model):\n%s", source, diff)
				}
			}
		})
	}
}

// likeRow returns the model's row of the same profile, with ? where the capture
// has it.
func likeRow(m *nvmlsim.Model, row string, inGiB bool) string {
	captured := strings.Fields(row)
	for _, p := range m.MIG.Profiles {
		if p.Name != captured[0] {
			continue
		}
		memory := fmt.Sprint(p.MemorySizeMB)
		if inGiB {
			memory = fmt.Sprintf("%.2f", float64(p.MemorySizeMB)/1024)
		}
		if captured[1] == "?" {
			memory = "?"
		}
		got := []string{p.Name, memory}
		for i, n := range []uint32{p.MultiprocessorCount, p.CopyEngineCount, p.DecoderCount, p.EncoderCount, p.JPEGCount, p.OFACount, p.InstanceCount} {
			cell := fmt.Sprint(n)
			if captured[i+2] == "?" {
				cell = "?"
			}
			got = append(got, cell)
		}
		return strings.Join(got, " ")
	}
	return "no such profile"
}

// Ids and placements are the same on all products with the same number of
// memory slices (seen on A100, H100, H200, A30, RTX PRO 6000; the MIG user
// guide).
func TestIDsAndPlacesAreThoseOfTheKind(t *testing.T) {
	type row struct {
		id     uint32
		places string
	}
	kinds := map[uint32]map[string]row{
		8: {
			"1g:1": {19, "[0 1 2 3 4 5 6]:1"}, "1g+me:1": {20, "[0 1 2 3 4 5 6]:1"}, "1g:2": {15, "[0 2 4 6]:2"},
			"2g:2": {14, "[0 2 4]:2"}, "3g:4": {9, "[0 4]:4"}, "4g:4": {5, "[0]:4"}, "7g:8": {0, "[0]:8"},
		},
		4: {
			"1g:1": {14, "[0 1 2 3]:1"}, "1g+me:1": {21, "[0 1 2 3]:1"}, "2g:2": {5, "[0 2]:2"}, "2g+me:2": {6, "[0 2]:2"}, "4g:4": {0, "[0]:4"},
		},
		12: {
			"1g:3": {14, "[0 3 6 9]:3"}, "1g+me:3": {21, "[0 3 6 9]:3"}, "1g+gfx:3": {47, "[0 3 6 9]:3"}, "1g+me.all:3": {65, "[0 3 6 9]:3"}, "1g-me:3": {67, "[0 3 6 9]:3"},
			"2g:6": {5, "[0 6]:6"}, "2g+gfx:6": {35, "[0 6]:6"}, "2g+me.all:6": {64, "[0 6]:6"}, "2g-me:6": {66, "[0 6]:6"},
			"4g:12": {0, "[0]:12"}, "4g+gfx:12": {32, "[0]:12"},
		},
	}
	for _, m := range models(t) {
		if m.MIG == nil {
			continue
		}
		got := map[string]row{}
		for _, p := range m.MIG.Profiles {
			_, suffix, _ := strings.Cut(p.Name, "gb")
			got[fmt.Sprintf("%dg%s:%d", p.SliceCount, suffix, p.Size)] = row{p.ID, fmt.Sprintf("%v:%d", p.Starts, p.Size)}
		}
		if diff := cmp.Diff(kinds[m.MIG.MemorySlices], got, cmp.AllowUnexported(row{})); diff != "" {
			t.Errorf("%s (-want +model):\n%s", m.ID, diff)
		}
	}
}
