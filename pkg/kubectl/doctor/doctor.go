// Package doctor is kubectl gpu doctor: what is wrong with GPUs, nodes, policies and
// Tessera's own pods.
package doctor

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// diagnosis is the doctor's output.
type diagnosis struct {
	Nodes int `json:"nodes"`
	// Examined are the nodes whose plugins were asked for their own findings.
	Examined int       `json:"examined"`
	Findings []finding `json:"findings"`
	// Unknown are sentences about what couldn't be looked at.
	Unknown []string `json:"unknown,omitempty"`
}

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu doctor.
func Command(o *cluster.Options) *cobra.Command {
	var exec bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong with GPUs, nodes, policies and Tessera's own pods",
		Long: `Look at all nodes at once, and say what is wrong and what to do: conditions of GPUs,
plugins that don't answer, other drivers, silicon that was allocated twice, nodes
without ResourceSlices, policies that are refused or not applied, devices that wait for
claims, claims on nodes that are gone, and pods of Tessera that aren't ready or that the
API server refuses.

With --exec it also runs kubelet-plugin doctor in the plugin's pod of each node, which
compares journal, CDI files, MIG instances and MPS daemons there. That takes the verb
create on pods/exec, and up to half a minute where pods start or end.

  trouble    somebody has to act; the exit status is 1
  warning    may become trouble, or less than somebody wanted; if there is nothing worse
             the exit status is 3, also where something couldn't be looked at
  leftover   unused, and removed automatically
  note       for information

The exit status is 0 if there is nothing worse than a leftover, and 2 if nothing could
be found out.`,
		Example: `  kubectl gpu doctor
  kubectl gpu doctor --exec
  kubectl gpu doctor -o json | jq -r '.findings[] | select(.level == "trouble") | .what'` + terminal.Shown(shown),
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cluster.OneOf(o.Output, "", "json", "yaml"); err != nil {
				return err
			}
			return diagnose(cmd.Context(), o, exec)
		},
	}
	cmd.Flags().BoolVar(&exec, "exec", false, "run kubelet-plugin doctor in the plugin's pod of each node, too")
	o.AddOutput(cmd, "json or yaml")
	return cmd
}

func diagnose(ctx context.Context, o *cluster.Options, exec bool) error {
	r, err := o.Reader(cluster.Missing{
		cluster.SlicesName:      "whether nodes publish their devices isn't known",
		cluster.ClaimsName:      "whether claims are left on nodes that are gone isn't known",
		cluster.InventoriesName: "conditions of GPUs and problems of nodes aren't known",
		cluster.PoliciesName:    "whether policies are applied isn't known",
		cluster.PodsName:        "whether Tessera's own pods are ready isn't known",
		cluster.DaemonSetsName:  "whether all of Tessera's pods can be created isn't known",
		cluster.EventsName:      "why pods of Tessera aren't created isn't known",
	})
	if err != nil {
		return err
	}
	p := new(patient)
	if p.Objects, err = r.Objects(ctx, o.CurrentNamespace()); err != nil {
		return err
	}
	if p.tesseraPods, err = r.TesseraPods(ctx); err != nil {
		return err
	}
	p.tesseraPodsRead = !r.AnyUnread(cluster.PodsName)
	if p.daemonSets, err = readDaemonSets(ctx, r); err != nil {
		return err
	}
	if err := canExamine(r, p); err != nil {
		return err
	}
	d := diagnosis{Nodes: len(p.Inventories), Findings: p.examine()}
	if exec {
		found, asked := examineNodes(ctx, r, p.tesseraPods, execDoctor(o, r))
		d.Findings, d.Examined = append(d.Findings, found...), asked
		sortFindings(d.Findings)
	}
	d.Unknown = r.Notes
	if o.Output == "" {
		terminal.OneLines(&d)
		writeDiagnosis(o, d)
		return d.verdict()
	}
	return cmp.Or(terminal.Write(o.Out, o.Output, d), d.verdict())
}

// canExamine returns an error if Tessera isn't installed, or if too little could be read to
// tell.
func canExamine(r *cluster.Reader, p *patient) error {
	inventoriesRead := !r.AnyUnread(cluster.InventoriesName)
	noPods := p.tesseraPodsRead && len(p.tesseraPods) == 0
	noInventories := (inventoriesRead || r.NotServed(cluster.InventoriesName)) && len(p.Inventories) == 0
	switch {
	case noPods && noInventories:
		return errors.New("the cluster has no GPUInventories and no pods of Tessera: it isn't installed there")
	case !p.tesseraPodsRead && !inventoriesRead:
		return r.RequireRead("what is wrong", cluster.PodsName, cluster.InventoriesName)
	}
	return nil
}

// verdict is the error that makes the exit status.
func (d *diagnosis) verdict() error {
	has := func(l severity) bool {
		return slices.ContainsFunc(d.Findings, func(f finding) bool { return f.Level == l })
	}
	switch {
	case has(trouble):
		return cluster.ErrNo
	case has(warning) || len(d.Unknown) > 0:
		return cluster.ErrWarnings
	}
	return nil
}

func writeDiagnosis(o *cluster.Options, d diagnosis) {
	counts := make(map[severity]int)
	for _, f := range d.Findings {
		counts[f.Level]++
		head := fmt.Sprintf("%-9s", strings.ToUpper(string(f.Level)))
		if f.Level == trouble {
			head = o.Screen.Red(head)
		}
		var about []string
		for _, s := range []string{f.Node, f.Subject} {
			if s != "" {
				about = append(about, s)
			}
		}
		fmt.Fprintf(o.Out, "%s %s: %s\n", head, strings.Join(about, ", "), f.What)
		if f.Do != "" {
			fmt.Fprintf(o.Out, "          do: %s\n", f.Do)
		}
	}
	for _, n := range d.Unknown {
		fmt.Fprintln(o.Out, "UNKNOWN   "+n)
	}
	fmt.Fprintf(o.Out, "%s: ", terminal.Count(d.Nodes, "node"))
	switch {
	case len(d.Findings) == 0 && len(d.Unknown) == 0:
		fmt.Fprintln(o.Out, "nothing is wrong.")
	case len(d.Findings) == 0:
		fmt.Fprintln(o.Out, "nothing is wrong with what could be looked at.")
	default:
		fmt.Fprintf(o.Out, "%d trouble, %s, %s, %s.\n", counts[trouble], terminal.Count(counts[warning], "warning"), terminal.Count(counts[leftover], "leftover"), terminal.Count(counts[note], "note"))
	}
	if d.Examined > 0 {
		fmt.Fprintf(o.Out, "The plugins of %s looked at their own state.\n", terminal.Count(d.Examined, "node"))
	}
}

// report is the output of kubelet-plugin doctor -o json.
type report struct {
	Findings []struct {
		Level                                     severity
		Check, What, Do, Claim, GPU, Device, Path string
	}
}

// pluginDoctor runs the doctor in a plugin's pod.
type pluginDoctor func(ctx context.Context, pod *corev1.Pod, stdout, stderr io.Writer) error

// examineNodes runs the doctors of the plugins, and counts those that answered. Plugins
// that don't are noted.
func examineNodes(ctx context.Context, r *cluster.Reader, pods []corev1.Pod, run pluginDoctor) (out []finding, asked int) {
	pods = cluster.Plugins(pods)
	found := make([][]finding, len(pods))
	errs := cluster.AtATime(len(pods), func(i int) (err error) {
		found[i], err = examineNode(ctx, &pods[i], run)
		return err
	})
	for i, err := range errs {
		out = append(out, found[i]...)
		switch {
		case err == nil:
			asked++
		case apierrors.IsForbidden(err):
			r.Note("You may not create pods/exec in namespace %s: the plugins weren't asked for their own findings. Ask for the verb create on it.", pods[i].Namespace)
		default:
			r.Note("The plugin of %s didn't answer: %v.", pods[i].Spec.NodeName, err)
		}
	}
	return out, asked
}

// execDoctor is the pluginDoctor that uses pods/exec.
func execDoctor(o *cluster.Options, r *cluster.Reader) pluginDoctor {
	return func(ctx context.Context, p *corev1.Pod, stdout, stderr io.Writer) error {
		cfg, err := o.Flags.ToRESTConfig()
		if err != nil {
			return err
		}
		request := r.Kube.CoreV1().RESTClient().Post().Resource("pods").Namespace(p.Namespace).Name(p.Name).SubResource("exec").VersionedParams(&corev1.PodExecOptions{
			Container: "kubelet-plugin", Command: []string{"kubelet-plugin", "doctor", "-o", "json"}, Stdout: true, Stderr: true,
		}, scheme.ParameterCodec)
		executor, err := remotecommand.NewWebSocketExecutor(cfg, "GET", request.URL().String())
		if err != nil {
			return err
		}
		return executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: stdout, Stderr: stderr})
	}
}

// examineNode runs the doctor of one plugin. It exits with an error if it finds trouble.
func examineNode(ctx context.Context, p *corev1.Pod, run pluginDoctor) ([]finding, error) {
	var stdout, stderr bytes.Buffer
	err := run(ctx, p, &limited{&stdout}, &limited{&stderr})
	var answer report
	if decoded := json.Unmarshal(stdout.Bytes(), &answer); decoded != nil {
		if err == nil {
			err = decoded
		}
		if said := strings.TrimSpace(stderr.String()); said != "" {
			err = fmt.Errorf("%w: %s", err, said)
		}
		return nil, err
	}
	var out []finding
	for _, f := range answer.Findings {
		about := ""
		for _, s := range []string{f.Claim, f.Device, f.GPU, f.Path} {
			if about == "" {
				about = s
			}
		}
		out = append(out, finding{Level: f.Level, Check: f.Check, Node: p.Spec.NodeName, Subject: about, What: f.What, Do: f.Do})
	}
	return out, nil
}

// maxAnswer is how large the answer of a plugin may be.
const maxAnswer = 1 << 20

// limited keeps a broken plugin from filling the memory.
type limited struct{ io.Writer }

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	if b, ok := l.Writer.(*bytes.Buffer); ok && b.Len() > maxAnswer {
		return 0, errors.New("the answer is too long")
	}
	return l.Writer.Write(p)
}
