// Runs in the page before its own scripts: keeps what a test wants to look at in window.probe.
// It only watches; the page and its client are the real ones.
(() => {
  const probe = (window.probe = {
    peers: [], // every RTCPeerConnection of the page
    events: [], // every message of the `events` channel, with its time of arrival
    micAtMs: null, // when the microphone began, so when its file began
    levels: [], // [performance ms, rms] of each 20 ms of what is played
    onsets: [], // performance ms of each sound that follows at least 200 ms of silence
    frames: [], // the test pattern's frames: {shownMs, counter, flash}
    motion: [], // {atMs, mouth, still}: mean absolute difference to the frame before
  });

  const Peer = window.RTCPeerConnection;
  window.RTCPeerConnection = class extends Peer {
    constructor(...options) {
      super(...options);
      probe.peers.push(this);
    }
    createDataChannel(label, options) {
      const channel = super.createDataChannel(label, options);
      const keep = ({ data }) => probe.events.push({ atMs: performance.now(), ...JSON.parse(data) });
      if (label === "events") channel.addEventListener("message", keep);
      return channel;
    }
  };

  const devices = navigator.mediaDevices;
  const open = devices?.getUserMedia.bind(devices);
  if (open) {
    devices.getUserMedia = async (wanted) => {
      const stream = await open(wanted);
      probe.micAtMs = performance.now();
      return stream;
    };
  }

  const video = () => document.getElementById("video");

  // The voice that is being played. lowpassHz keeps the pattern's 1 kHz beep out; 0 keeps all.
  probe.hear = async (lowpassHz) => {
    const context = new AudioContext({ sampleRate: 48000 });
    const meterUrl = URL.createObjectURL(new Blob([probeMeter], { type: "text/javascript" }));
    await context.audioWorklet.addModule(meterUrl);
    let last = context.createMediaStreamSource(video().srcObject);
    for (let pole = 0; lowpassHz && pole < 4; pole++) {
      last = last.connect(new BiquadFilterNode(context, { type: "lowpass", frequency: lowpassHz }));
    }
    const meter = new AudioWorkletNode(context, "probe-meter", { numberOfOutputs: 0 });
    meter.port.onmessage = ({ data }) => {
      // When the browser handed the sound out, as getStats counts. The output timestamp is that of
      // this context's own output, 40 ms later with a fake device; the page's voice does not pass it.
      const { contextTime, performanceTime } = context.getOutputTimestamp();
      const latencyS = context.outputLatency + context.baseLatency;
      const atMs = performanceTime + 1000 * (data.contextS - contextTime - latencyS);
      if (data.rms === undefined) probe.onsets.push(atMs);
      else probe.levels.push([atMs, data.rms]);
    };
    last.connect(meter);
    await context.resume();
  };

  const eachFrame = (width, height, look) => {
    const canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    const next = (nowMs, about) => {
      video().requestVideoFrameCallback(next);
      context.drawImage(video(), 0, 0, width, height);
      look(context, about, nowMs);
    };
    video().requestVideoFrameCallback(next);
  };

  // Reads the test pattern as engine/pattern.py describes it.
  probe.read = () => {
    const [width, height] = [160, 100];
    eachFrame(width, height, (context, { expectedDisplayTime }) => {
      const row = context.getImageData(0, 0.09 * height, width, 1).data;
      let counter = 0;
      for (let bit = 0; bit < 16; bit++) {
        const level = row[4 * Math.round(((2.5 + bit) / 20) * width) + 1];
        counter = 2 * counter + (level > 125 ? 1 : 0);
      }
      const flash = context.getImageData(width / 2, 0.45 * height, 1, 1).data[1] > 125;
      probe.frames.push({ shownMs: expectedDisplayTime, counter, flash });
    });
  };

  // box and still: [left, top, width, height] in pixels of the video.
  probe.compare = (box, still) => {
    const before = [null, null];
    eachFrame(video().videoWidth, video().videoHeight, (context, _about, nowMs) => {
      const [mouth, rest] = [box, still].map((area, which) => {
        const { data } = context.getImageData(...area);
        const old = before[which];
        before[which] = data;
        let sum = 0;
        for (let i = 1; old && i < data.length; i += 4) sum += Math.abs(data[i] - old[i]);
        return sum / (data.length / 4);
      });
      probe.motion.push({ atMs: nowMs, mouth, still: rest });
    });
  };

  probe.inbound = async () => {
    const reports = {};
    for (const report of (await probe.peers.at(-1).getStats()).values()) {
      if (report.type === "inbound-rtp") reports[report.kind] = report;
    }
    return { ...reports, atMs: performance.now() };
  };
})();
