"""What learning.md says beside its figures: the setting, and for each part what is asked and how to read the answer."""

SETTING = [
    "What each technique does to accuracy where two cores can train it. A training is one process with one thread:",
    "`podscale train` with a ResNet-18 of width 16 (0.7 M parameters, ImageNet's stem) on imagenette, 9,469",
    "photographs of ten classes, packed at a short side of 40 px (JPEG quality 95). Random crops of 0.35 to 1 of the",
    "area at 32 px, 12 epochs, label smoothing 0.1, momentum 0.9, decay 5e-4, three epochs of warm-up from 0, then",
    "polynomial decay of power 2 to 0; in parts (b) to (e) 8 epochs, two of them warm-up. Top-1 is",
    "that of the last evaluation, on 3,925 held-out photographs.",
    "",
    "Size and length were chosen by four pilot runs of SGD with Nesterov's momentum and cosine decay at batch 256:",
    "width 32 at 32 px and 6 epochs 56.1 %; width 16 at 64 px and 6 epochs 60.1 %, at 32 px and 15 epochs 64.8 % (64",
    "CPU seconds), at 48 px and 10 epochs 64.9 % (84 CPU seconds).",
    "",
    "Deviations are over seeds, which change initial weights, sample order and crops. `from the first` is the",
    "difference of the means to the first row with its 95 % interval (Student's t, pooled variance); where the",
    "interval holds 0, it is `within noise`. With three seeds only large effects can be told from noise.",
    "",
    "`python benchmarks/learning.py imagenette224.tar --work FOLDER` trains what FOLDER has no record of and writes",
    "this; where n is below 3, the rest was not trained yet. The machine was busy with other work meanwhile.",
    "Two trainings are left out because they were stopped: a first one at batch 2,048 after 6 of 12 epochs, for lack",
    "of time, and one at batch 256 after seconds.",
    "",
]

QUESTIONS = {
    "a": "Batch 4,096 is 43 % of the data set, 2.3 updates an epoch. At equal epochs, does LARS (You 2017; Ying 2018 "
    "with it) keep what SGD loses? Both have the same warm-up, decay, momentum and weight decay; each optimizer has a "
    "sweep of its learning rate by factors of 2 at each batch (three rates, up to two more where the best was at the "
    "edge), with the first of the three seeds, which flatters the chosen rates a little, alike for both. `Linear "
    "rule` is the best rate of SGD at batch 256 times batch / 256 (Goyal 2017).",
    "b": "Each of 64 ranks would have 4 images of a batch of 256 (a span smaller than a rank's batch is computed in "
    "sub-batches, so one process stands for all of them). Ying 2018 and Kumar 2019 share statistics in groups of ranks "
    "where the batch of one is too small. Running statistics are the mean over all groups, whatever the span.",
    "c": "Autocast of the forward pass to bfloat16, with batch norm's statistics, the loss, master weights and the "
    "optimizer in fp32 (Ying 2018, Jia 2018).",
    "d": "Jia 2018 leaves decay off biases and batch norm, as MLPerf's reference does; LARS then takes no trust "
    "ratio of them either.",
    "e": "Codreanu 2017 ends a run with a short phase of doubled decay, quadratic learning-rate decay and crops "
    "without change of scale and aspect (reported: 75.6 to 76.1 % on ImageNet). All arms have the same 8 epochs.",
}

READING = {
    "a": "",
    "b": "The smaller the span, the worse, and a single rank of 4 images loses by far the most; 16 ranks are close to "
    "all 64. The effect is larger here than it would be at 224 px: the last stage of this network has one pixel, so "
    "4 images are 4 values a channel, where ResNet-50 at 224 px has 49 times as many.",
    "c": "",
    "d": "",
    "e": "",
}
