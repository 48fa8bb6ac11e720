// Package fits is kubectl gpu fits: where a claim fits, how often, or what is in the way.
package fits

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// question is a question of the command fits: whether the claims of one pod fit.
type question struct {
	Name   string                       `json:"name"`
	Answer fit.Answer                   `json:"answer"`
	claims []*resourceapi.ResourceClaim // never printed
}

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu fits.
func Command(o *cluster.Options) *cobra.Command {
	var amount, file string
	var limit int
	cmd := &cobra.Command{
		Use:   "fits [PROFILE | --memory QUANTITY | -f FILE]",
		Short: "Say where a claim fits, how often, or which claims are in the way",
		Long: `Say on which nodes a claim fits now, and how often: one pod with such a claim after
the other, as the scheduler would place them. If it fits nowhere, say why, and after
the end of which claims it would. The scheduler's own allocator judges; processors,
memory and taints of nodes don't count.

A profile asks for a MIG partition. --memory asks three times: for an MPS share of so
much memory, a partition and a whole GPU that have at least so much. A file has
ResourceClaims or ResourceClaimTemplates, of any version of the API; a pod would have
all of them. Unknown fields in it are errors. Other kinds in it are ignored: a
SharingPolicy counts once it is applied.

The exit status is 1 if nothing fits.`,
		Example: `  kubectl gpu fits 3g.40gb
  kubectl gpu fits --memory 20Gi
  kubectl gpu fits -f claim.yaml
  kubectl create -f pod.yaml --dry-run=server && kubectl gpu fits -f claim.yaml && kubectl apply -f pod.yaml` + terminal.Shown(shown),
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cluster.OneOf(o.Output, "", "json", "yaml"); err != nil {
				return err
			}
			if limit < 1 {
				return fmt.Errorf("--limit %d: want at least 1", limit)
			}
			asked, err := ask(args, amount, file, o.In)
			if err != nil {
				return err
			}
			return answer(cmd.Context(), o, asked, limit)
		},
	}
	cmd.Flags().StringVar(&amount, "memory", "", "device memory, such as 20Gi")
	cmd.Flags().StringVarP(&file, "filename", "f", "", "file with ResourceClaims or ResourceClaimTemplates; - for standard input")
	cmd.Flags().IntVar(&limit, "limit", 64, "stop counting on a node at this number")
	o.AddOutput(cmd, "json or yaml")
	return cmd
}

// ask makes the questions that the command line asks.
func ask(args []string, amount, file string, in io.Reader) ([]question, error) {
	set := len(args)
	for _, s := range []string{amount, file} {
		if s != "" {
			set++
		}
	}
	switch {
	case set != 1:
		return nil, errors.New("say what is to fit: a profile such as 3g.40gb, --memory 20Gi, or -f FILE")
	case len(args) == 1:
		return askProfile(args[0])
	case amount != "":
		return askMemory(amount)
	default:
		claims, err := readClaims(file, in)
		return []question{{Name: file, claims: claims}}, err
	}
}

func askProfile(name string) ([]question, error) {
	if !regexp.MustCompile(`^[1-9][0-9]?g\.[1-9][0-9]*gb([+-][a-z]+(\.[a-z]+)*)*$`).MatchString(name) {
		return nil, fmt.Errorf("%q is no MIG profile, such as 1g.10gb or 3g.40gb; for a claim of your own, use -f FILE", name)
	}
	expression := fmt.Sprintf(`device.attributes["%s"].?profile.orValue("") == %q`, gpu.DriverName, name)
	return []question{{Name: "partition " + name, claims: one(gpu.ClassMIG, expression, nil)}}, nil
}

func askMemory(amount string) ([]question, error) {
	q, err := resource.ParseQuantity(amount)
	if err != nil || q.Sign() <= 0 {
		return nil, fmt.Errorf("--memory %s: want an amount such as 20Gi", amount)
	}
	enough := fmt.Sprintf(`device.capacity["%s"].memory.compareTo(quantity(%q)) >= 0`, gpu.DriverName, q.String())
	share := map[resourceapi.QualifiedName]resource.Quantity{gpu.MemoryCapacity: q}
	return []question{
		{Name: "MPS share of " + q.String(), claims: one(gpu.ClassMPS, "", share)},
		{Name: "partition of at least " + q.String(), claims: one(gpu.ClassMIG, enough, nil)},
		{Name: "whole GPU of at least " + q.String(), claims: one(gpu.ClassGPU, enough, nil)},
	}, nil
}

// one is a claim with one request.
func one(class, expression string, capacity map[resourceapi.QualifiedName]resource.Quantity) []*resourceapi.ResourceClaim {
	e := &resourceapi.ExactDeviceRequest{DeviceClassName: class}
	if expression != "" {
		e.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	}
	if capacity != nil {
		e.Capacity = &resourceapi.CapacityRequirements{Requests: capacity}
	}
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "asked"}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "device", Exactly: e}}
	fit.Default(c)
	return []*resourceapi.ResourceClaim{c}
}

// answer answers the questions.
func answer(ctx context.Context, o *cluster.Options, asked []question, limit int) error {
	r, err := o.Reader(cluster.Missing{cluster.RulesName: cluster.NoRules, cluster.NodesName: cluster.NoNodes})
	if err != nil {
		return err
	}
	j, _, err := r.Judge(ctx, o.CurrentNamespace(), nil)
	if err != nil {
		return err
	}
	r.NoteVersion()
	defer r.PrintNotes(o.ErrOut)
	count := 0
	for i := range asked {
		if asked[i].Answer, err = j.Fits(ctx, j.Nodes(), fit.PodClaims{Waiting: asked[i].claims}, limit); err != nil {
			return err
		}
		count += asked[i].Answer.Count
	}
	if o.Output != "" {
		err = terminal.Write(o.Out, o.Output, asked)
	} else {
		terminal.OneLines(&asked)
		err = writeAnswers(o.Out, asked)
	}
	if err == nil && count == 0 {
		return cluster.ErrNo
	}
	return err
}

func writeAnswers(out io.Writer, asked []question) error {
	for i, q := range asked {
		if i > 0 {
			fmt.Fprintln(out)
		}
		if q.Answer.Count == 0 {
			fmt.Fprintf(out, "%s: fits nowhere now.\n  %s\n  %s\n", q.Name, q.Answer.Reason.Text, q.Answer.Reason.Change)
			continue
		}
		more := ""
		if q.Answer.More {
			more = " or more"
		}
		fmt.Fprintf(out, "%s: fits %d times%s.\n", q.Name, q.Answer.Count, more)
		w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
		fmt.Fprintln(w, "  NODE\tTIMES\tTHE FIRST WOULD GET")
		for _, n := range q.Answer.Nodes {
			fmt.Fprintf(w, "  %s\t%d\t%s\n", n.Node, n.Count, strings.Join(n.Devices, ","))
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}
