// Command images draws the pictures of docs/user/mig.md: the placements of MIG
// partitions on a GPU, from the tables of sim/nvmlsim, and partitions that fit
// together; and that of docs/user/operate.md.
//
// It isn't part of the product; go generate runs it in its own directory.
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

//go:generate go run .

func main() {
	if err := draw(); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func draw() error {
	for _, id := range []string{"h100-80gb", "a30", "rtx-pro-6000"} {
		m, err := nvmlsim.FindModel(id)
		if err != nil {
			return err
		}
		if err := placements(m).write("mig-" + id + ".svg"); err != nil {
			return err
		}
	}
	m, err := nvmlsim.FindModel("h100-80gb")
	if err != nil {
		return err
	}
	p, err := packing(m)
	if err != nil {
		return err
	}
	if err := p.write("mig-packing.svg"); err != nil {
		return err
	}
	return ranks().write("packing.svg")
}

// Sizes in pixels.
const (
	left    = 150 // room for a row's name
	gpuWide = 480
	right   = 250 // room for the text about a row
	row     = 34
	bar     = 26
	top     = 56
)

// picture is rows of boxes over memory slices.
type picture struct {
	slices uint32
	rows   int
	body   strings.Builder
}

func newPicture(title string, slices uint32, unit, head string) *picture {
	p := &picture{slices: slices}
	p.text(10, 22, "bold", title)
	for s := range slices {
		p.text(p.x(s)+gpuWide/int(slices)/2-4, top-10, "small", fmt.Sprint(s))
	}
	p.text(10, top-10, "small", unit)
	p.text(left+gpuWide+14, top-10, "small", head)
	return p
}

func (p *picture) x(slice uint32) int { return left + gpuWide*int(slice)/int(p.slices) }

func (p *picture) y() int { return top + p.rows*row }

func (p *picture) text(x, y int, class, s string) {
	s = strings.NewReplacer("&", "&amp;", "<", "&lt;").Replace(s)
	fmt.Fprintf(&p.body, "<text x=\"%d\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, s)
}

// add draws a row: its name, the empty GPU, and a text about it.
func (p *picture) add(name, about string) {
	p.text(10, p.y()+18, "", name)
	for s := range p.slices {
		fmt.Fprintf(&p.body, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" class=\"free\"/>\n", p.x(s), p.y(), p.x(s+1)-p.x(s), bar)
	}
	p.text(left+gpuWide+14, p.y()+18, "small", about)
}

// box draws a device in the row that was added last.
func (p *picture) box(start, size uint32, class, label string) {
	x := p.x(start) + 2
	wide := p.x(start+size) - x - 2
	fmt.Fprintf(&p.body, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"4\" class=\"%s\"/>\n", x, p.y()+2, wide, bar-4, class)
	p.text(x+6, p.y()+18, "label", label)
}

func (p *picture) next() { p.rows++ }

const style = `<style>
text { font: 13px sans-serif; fill: #1a1a1a } .small { font-size: 12px; fill: #555 } .bold { font-weight: bold; font-size: 15px }
.label { font-size: 11px; fill: #fff } .free { fill: #f3f3f3; stroke: #c8c8c8; stroke-dasharray: 2 2 }
.g1 { fill: #2e7d32 } .g2 { fill: #1565c0 } .g3 { fill: #6a1b9a } .g4 { fill: #ad1457 } .all { fill: #424242 }
</style>
`

func (p *picture) write(path string) error {
	wide, high := left+gpuWide+right, p.y()+8
	svg := fmt.Sprintf("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\">\n", wide, high, wide, high) +
		style + "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n" + p.body.String() + "</svg>\n"
	return os.WriteFile(path, []byte(svg), 0o644) //nolint:forbidigo // a picture can be drawn again
}

// class is a profile's colour: by its compute slices.
func class(q nvmlsim.Profile, whole bool) string {
	if whole {
		return "all"
	}
	return fmt.Sprintf("g%d", min(q.SliceCount, 4))
}

// placements are all the places where partitions of a product can lie, a row a
// profile.
func placements(m *nvmlsim.Model) *picture {
	p := newPicture(m.ProductName+": where each partition can lie", m.MIG.MemorySlices, "memory slice", "at most, each with")
	for _, q := range m.MIG.Profiles {
		p.add(q.Name, fmt.Sprintf("%d  ·  %.1f GiB, %d of %d SMs", q.InstanceCount, float64(q.MemorySizeMB)/1024, q.MultiprocessorCount, m.Engines.Multiprocessors))
		for _, s := range q.Starts {
			p.box(s, q.Size, class(q, q.Size == m.MIG.MemorySlices), label(s, q.Size, m.MIG.MemorySlices))
		}
		p.next()
	}
	p.add("the whole GPU", "1  ·  without MIG, so all of it")
	p.box(0, m.MIG.MemorySlices, "all", "")
	p.next()
	return p
}

func label(start, size, slices uint32) string {
	if size*8 <= slices {
		return fmt.Sprint(start)
	}
	return fmt.Sprintf("at %d", start)
}

// placed is a partition at its place.
type placed struct {
	profile string
	start   uint32
}

// packing shows which partitions fit together on an empty GPU of the product,
// and the effect of their order. pkg/offer places 1g at 6, 4 and 5 first.
func packing(m *nvmlsim.Model) (*picture, error) {
	p := newPicture("What fits together on one "+m.ProductName, m.MIG.MemorySlices, "memory slice", "")
	for _, r := range []struct {
		name, about string
		there       []placed
	}{
		{"seven small", "slice 7 has no 1g.10gb: memory is left", []placed{{"1g.10gb", 0}, {"1g.10gb", 1}, {"1g.10gb", 2}, {"1g.10gb", 3}, {"1g.10gb", 4}, {"1g.10gb", 5}, {"1g.10gb", 6}}},
		{"one of each size", "", []placed{{"4g.40gb", 0}, {"2g.20gb", 4}, {"1g.10gb", 6}}},
		{"two halves", "all memory is used", []placed{{"3g.40gb", 0}, {"3g.40gb", 4}}},
		{"as Tessera places 1g", "there is still room for a 4g.40gb", []placed{{"1g.10gb", 6}, {"1g.10gb", 4}, {"1g.10gb", 5}}},
		{"from the left", "a 3g.40gb fits, no 4g.40gb does", []placed{{"1g.10gb", 0}, {"1g.10gb", 1}, {"1g.10gb", 2}}},
	} {
		p.add(r.name, r.about)
		for _, at := range r.there {
			q, err := profile(m, at)
			if err != nil {
				return nil, err
			}
			p.box(at.start, q.Size, class(q, false), at.profile)
		}
		p.next()
	}
	return p, nil
}

// profile of the product that has this place.
func profile(m *nvmlsim.Model, at placed) (nvmlsim.Profile, error) {
	for _, q := range m.MIG.Profiles {
		for _, s := range q.Starts {
			if q.Name == at.profile && s == at.start {
				return q, nil
			}
		}
	}
	return nvmlsim.Profile{}, fmt.Errorf("%s has no %s at %d", m.ProductName, at.profile, at.start)
}

// ranks are nodes of eight GPUs that the same pods use without ranks and with them, a row a node.
func ranks() *picture {
	const gpus = 8
	p := newPicture("Twelve GPUs in use on three nodes of eight", gpus, "GPU", "")
	for _, n := range []struct {
		name, about string
		pods        []uint32
	}{
		{"before: node a", "no room for eight", []uint32{2, 1, 1}},
		{"node b", "no room for eight", []uint32{1, 2, 1}},
		{"node c", "no room for eight", []uint32{1, 1, 1, 1}},
		{"with ranks: node a", "no rank", []uint32{2, 1, 1, 2, 1, 1}},
		{"node b", "rank 1", []uint32{1, 1, 1, 1}},
		{"node c", "reserve: room for eight", nil},
	} {
		p.add(n.name, n.about)
		at := uint32(0)
		for _, size := range n.pods {
			p.box(at, size, fmt.Sprintf("g%d", size), fmt.Sprint(size))
			at += size
		}
		p.next()
	}
	return p
}
